"""The digest of a run's initial weights, which ranks compute together."""

import hashlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tokamake import files
from tokamake.checkpoint.latest import REMEDY
from tokamake.checkpoint.native.folder import locate
from tokamake.checkpoint.native.resume_state import read_state
from tokamake.checkpoint.torch_files.dcp_metadata import SUFFIX
from tokamake.errors import UserError
from tokamake.models.common.random_weights import SCHEME
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.runtime.timed_rounds import in_rounds

_BLOCK = 1 << 22


def weights_digest(
    checkpoint: Path | None,
    ranks: Ranks,
    *,
    note: Path | None = None,
    beat: Callable[[], object] = lambda: None,
) -> str:
    """Hash of a run's initial weights; all ranks call this together.

    Random weights follow from settings that the run's digest holds, and from the way to draw them.
    For a checkpoint of a tokamake run, hash the run's digest, the step, and the changes and bad
    steps until there, and read no weights. For other checkpoints, hash all bytes; ranks share the
    files.

    Args:
        checkpoint: its folder, or one whose `latest` names it; None: the weights are random.
        note: file that keeps the hash; bytes are read again only if sizes or times of files change.
    """
    if checkpoint is None:
        return files.digest({"random_weights": SCHEME})
    # Only rank 0 looks at the folder: other hosts may still see an older state of it.
    agreed: list[Any] = [None, None]
    with raise_on_all_ranks():
        if ranks.rank == 0:
            agreed = [*_known_digest(locate(checkpoint), checkpoint, note=note)]
    dist.broadcast_object_list(agreed, src=0)
    digest: str | None
    stats: list[Any]
    digest, stats = agreed
    if digest is not None:
        return digest
    paths = [Path(path) for path, *_ in stats]
    by_size = sorted(range(len(paths)), key=lambda number: -stats[number][1])
    own = [paths[number] for number in by_size[ranks.rank :: ranks.world_size]]
    hashes = dict(chain.from_iterable(in_rounds(_hashes(own), ranks, beat=beat)))
    digest = files.digest([hashes[path] for path in paths])
    with raise_on_all_ranks():
        if note and ranks.rank == 0:
            files.write_json(note, {"files": stats, "digest": digest})
    return digest


def _known_digest(
    folder: Path, checkpoint: Path, *, note: Path | None
) -> tuple[str | None, list[list[Any]]]:
    """Digest of a checkpoint if no weights have to be read for it, else None.

    Returns:
        The digest; path, size and time of the last change (ns) of each file to read.
    """
    if state := read_state(folder):
        lineage = {"lineage": state.lineage} if state.lineage else {}
        bad_steps = state.guard.effect(state.step)
        known = {"run": state.digest, "step": state.step, **lineage, **bad_steps}
        return files.digest(known), []
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise UserError(f"{checkpoint}: holds no weights in tokamake's own format; {REMEDY}")
    stats = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    noted = _read_note(note) if note else {}
    return (str(noted["digest"]) if noted.get("files") == stats else None), stats


def _read_note(note: Path) -> dict[str, Any]:
    """Content of a note; empty if it is missing or damaged: it only saves time."""
    try:
        noted = files.read_json(note, "")
    except UserError:
        return {}
    return noted if isinstance(noted, dict) and "digest" in noted else {}


def _hashes(paths: list[Path]) -> Iterator[tuple[Path, str] | None]:
    """SHA-256 of each file, in hexadecimal; None after each block that is read."""
    buffer = memoryview(bytearray(_BLOCK))
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
                yield None
        yield path, digest.hexdigest()
