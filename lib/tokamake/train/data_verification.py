"""Compare the datasets and the index of a run with their hashes, before it trains.

Manifests state the hashes; `index` computed them for datasets of other programs.
Rank 0 lists the byte ranges to read, and all ranks share them. A note beside the output folder
keeps size, time and hash of each file that was read: the next job does not read it again.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tokamake import files
from tokamake.config.resolved_run import Run
from tokamake.data.indexed.manifest import HashedRange, find_manifest, hashed_ranges
from tokamake.data.indexed.paths import file_path, manifest_path
from tokamake.errors import UserError
from tokamake.runtime.console import counted
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.runtime.timed_rounds import in_rounds
from tokamake.units import duration, in_bytes

AUTO_BYTES = 20 * 10**9
"""With `verify_data: auto`, bytes per host that are read at most."""
_BLOCK = 1 << 22
_Noted = dict[str, list[Any]]
"""Size, time of the last change (ns) and hash of each file that was verified, by path."""


class _File(NamedTuple):
    """A file of a dataset that is to be read."""

    path: Path
    stated_in: Path
    """The manifest, or the index.json, that states the hashes."""
    ranges: list[HashedRange]
    identity: list[Any]
    """Size, time of the last change (ns) and hash of the whole file."""

    def tasks(self) -> Iterator["_Task"]:
        """Tasks that read the file together."""
        start = 0
        for hashed in self.ranges:
            yield _Task(str(self.path), str(self.stated_in), start, *hashed)
            start += hashed.size


class _Task(NamedTuple):
    """A range of bytes that one rank reads."""

    path: str
    stated_in: str
    start: int
    size: int
    sha256: str


def verify_data(
    run: Run, ranks: Ranks, index: dict[str, Any], *, beat: Callable[[], object] = lambda: None
) -> None:
    """Compare the run's datasets and index with their hashes, as `train.verify_data` says.

    All ranks call this together. It takes about 0.6 s of CPU time for a GB.
    """
    if run.train.verify_data is False:
        return
    note, unread = run.output.with_name(f".{run.output.name}.verified"), list[_File]()
    noted = _read_note(note) if ranks.rank == 0 else {}
    agreed: list[Any] = [None]
    with raise_on_all_ranks():
        if ranks.rank == 0:
            unread = _select(run, ranks, unread=[*_unread_files(run, index, noted=noted)])
            tasks = (task for file in unread for task in file.tasks())
            agreed = [sorted(tasks, key=lambda task: -task.size)]
    dist.broadcast_object_list(agreed, src=0)
    begin, left = time.monotonic(), Counter(task.path for task in agreed[0])
    total, num_read = sum(task.size for task in agreed[0]), 0
    own = agreed[0][ranks.rank :: ranks.world_size]
    for finished in in_rounds(_read(own), ranks, beat=beat) if agreed[0] else ():
        if ranks.rank == 0:
            left.subtract(task.path for task in finished)
            noted |= {str(file.path): file.identity for file in unread if not left[str(file.path)]}
            with suppress(OSError):  # then the next job reads the files again
                files.write_json(note, noted)
            num_read += sum(task.size for task in finished)
            seconds = duration(time.monotonic() - begin)
            ranks.print_once(
                f"data: {in_bytes(num_read)} of {in_bytes(total)} agree with their hashes, after "
                f"{seconds}"
            )


# ---- What to read ----


def _unread_files(run: Run, index: dict[str, Any], *, noted: _Noted) -> Iterator[_File]:
    """Files that decide the samples of a run, and that have changed since they were noted."""
    splits = index["splits"] if run.train.evaluation_steps else ("train",)
    datasets = [dataset for split in splits for dataset in index["splits"][split]["files"]]
    both = ((dataset["prefix"], dataset.get("companion")) for dataset in datasets)
    prefixes = sorted({prefix for pair in both for prefix in pair if prefix})
    foreign = [prefix for prefix in prefixes if "bin" not in index["pairs"][prefix]["sha256"]]
    if foreign:
        print(
            f"data: {counted(len(foreign), 'dataset')} without a manifest ({foreign[0]}"
            f"{', …' * (len(foreign) > 1)}), compared with the hashes that `tokamake index` "
            "computed",
            flush=True,
        )
    for file, sha256 in index.get("sha256", {}).items():  # earlier versions have none
        stat = (path := run.index / file).stat()
        identity = [stat.st_size, stat.st_mtime_ns, sha256]
        if noted.get(str(path)) != identity:
            hashed = [HashedRange(stat.st_size, sha256)]
            yield _File(path, run.index / "index.json", hashed, identity)
    for prefix in prefixes:
        manifest = None
        hashes = {"bin": index["pairs"][prefix].get("content"), **index["pairs"][prefix]["sha256"]}
        for name in ("bin", "idx"):
            path, sha256 = file_path(run.data_root / prefix, name), hashes[name]
            stat = path.stat()
            identity = [stat.st_size, stat.st_mtime_ns, sha256]
            # Indexes of earlier versions have no hash of a foreign dataset's tokens.
            if sha256 is None or noted.get(str(path)) == identity:
                continue
            stated_in, ranges = run.index / "index.json", [HashedRange(stat.st_size, sha256)]
            if prefix not in foreign:
                stated_in = manifest_path(run.data_root / prefix)
                if name == "bin":
                    manifest = manifest or find_manifest(run.data_root / prefix) or {}
                    ranges = hashed_ranges(manifest)
            yield _File(path, stated_in, ranges, identity)


def _select(run: Run, ranks: Ranks, *, unread: list[_File]) -> list[_File]:
    """Return all files, or none and print a line, if they are too large for `auto`."""
    total = sum(file.identity[0] for file in unread)
    limit = AUTO_BYTES * max(ranks.world_size // ranks.local_size, 1)
    if run.train.verify_data is True or total <= limit:
        return unread
    print(
        f"data: {in_bytes(total)} are more than {in_bytes(AUTO_BYTES)} per host, so they are not "
        "compared with their hashes; train.verify_data: true compares them (0.6 s of CPU time per "
        "GB)",
        flush=True,
    )
    return []


# ---- Reading ----


def _read(tasks: list[_Task]) -> Iterator[_Task | None]:
    """Hash the bytes of each task; yield the task once it is finished, None after each block."""
    buffer = memoryview(bytearray(_BLOCK))
    for task in tasks:
        digest, left = hashlib.sha256(), task.size
        try:
            with Path(task.path).open("rb", buffering=0) as stream:
                stream.seek(task.start)
                while left and (count := stream.readinto(buffer[:left])):
                    digest.update(buffer[:count])
                    left -= count
                    yield None
        except OSError as error:  # errors of reading do not name the file
            raise OSError(error.errno, error.strerror, task.path) from None
        if digest.hexdigest() != task.sha256:
            raise UserError(
                f"{task.path}: damaged: bytes {task.start:,} to {task.start + task.size:,} differ "
                f"from the hash in {task.stated_in}; restore the file, or remove its dataset "
                "or index and run the workflow again"
            )
        yield task


# ---- Files that were verified ----


def _read_note(note: Path) -> _Noted:
    with suppress(UserError, OSError):
        content = files.read_json(note, "")
        return content if isinstance(content, dict) else {}
    return {}
