"""Random damage to one file at a time, and the count of its consequences.

A test gives the files and a function that reads all that a job reads; see `sweep`. `sweep_run`
damages the kept files of a run: a job continues with the same, or an error names the file.
"""

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tests.support.faults import Inject
from tokamake.checkpoint.native.folder import check_files
from tokamake.checkpoint.native.resume_state import newest_state
from tokamake.checkpoint.native.training_state import fill
from tokamake.checkpoint.torch_files import dcp_metadata
from tokamake.errors import UserError
from tokamake.train.checkpoints.resume import state_before

OUTCOMES = ("refused", "goes back", "says so", "starts again", "harmless", "silent")
"""With the name of the file; to the checkpoint before, or the file is made again; a changed
setting, which `train.on_change` decides; from the beginning; the same follows; another result.
"""
Damage = Callable[[random.Random, Path, list[Path]], None]
Counts = dict[str, Counter[str]]
"""How often each outcome followed, by row of the table."""
_READ: dict[bytes, dict[str, bytes]] = {}
"""Tensors of a checkpoint, by the hash of its files."""


def bit_flipped(rng: random.Random, path: Path, _: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncated(rng: random.Random, path: Path, _: list[Path]) -> None:
    size = path.stat().st_size
    os.truncate(path, rng.randrange(size) if size else 0)


def zeroed(rng: random.Random, path: Path, _: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(max(len(content), 1))
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    path.write_bytes(content)


def digit_changed(rng: random.Random, path: Path, everything: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    places = [place for place, byte in enumerate(content) if chr(byte).isdecimal() and byte < 128]
    if not places:
        return bit_flipped(rng, path, everything)
    place = rng.choice(places)
    content[place] = ord(rng.choice([d for d in "0123456789" if ord(d) != content[place]]))
    path.write_bytes(content)
    return None


def removed(_: random.Random, path: Path, __: list[Path]) -> None:
    path.unlink()


def exchanged(rng: random.Random, path: Path, everything: list[Path]) -> None:
    """The content of a file with the same suffix takes its place."""
    others = [other for other in everything if other.suffix == path.suffix and other != path]
    if others:
        path.write_bytes(rng.choice(others).read_bytes())


def stale(rng: random.Random, path: Path, everything: list[Path]) -> None:
    """The content of a file with the same name takes its place: of an earlier step."""
    others = [other for other in everything if other.name == path.name and other != path]
    if others:
        path.write_bytes(rng.choice(others).read_bytes())


DAMAGES: list[Damage] = [
    *(bit_flipped, truncated, zeroed, digit_changed, removed, exchanged, stale)
]


def sweep(
    files: Iterable[Path],
    outcome: Callable[[Path], str],
    *,
    everything: list[Path],
    group: Callable[[Path], str],
    faults_a_file: int,
    inject: Inject,
) -> Counts:
    """Damage each file several times, in all ways in turn; restore it after each fault.

    `outcome` reads what a job reads and returns one of `OUTCOMES`; the content of a file of
    `everything` may take the place of another one's; `group` is a row of the table.

    Raises:
        AssertionError: another result followed, or an error that does not name the file.
    """
    rng, counts = random.Random(53), Counts()
    for place, path in enumerate(files):
        content, stat = path.read_bytes(), path.stat()
        for number in range(faults_a_file):
            damage = DAMAGES[(number + place) % len(DAMAGES)]
            damage(rng, path, everything)
            if path.is_file() and path.read_bytes() == content:  # no other file, or zeros already
                damage = bit_flipped
                damage(rng, path, everything)
            inject()
            found = outcome(path)
            assert found in OUTCOMES[:-1], f"{path}: {damage.__name__}, {number}: {found}"
            counts.setdefault(group(path), Counter())[found] += 1
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return counts


def table(counts: Counts) -> str:
    lines = [f"| file | faults | {' | '.join(OUTCOMES)} |", "|---|" + "---:|" * (len(OUTCOMES) + 1)]
    for name, outcomes in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        numbers = (outcomes.total(), *(outcomes[each] for each in OUTCOMES))
        lines.append(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |")
    return "\n".join(lines)


def tensor_bytes(folder: Path) -> dict[str, bytes]:
    """Read all tensors of a native checkpoint as a job does that continues from it.

    Most faults damage other files, so a folder with the same bytes is read once.

    Raises:
        UserError: a file is damaged.
    """
    content = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content.update(f"{path}\n".encode() + (path.read_bytes() if path.is_file() else b""))
    if (key := content.digest()) not in _READ:
        check_files(folder)
        tensors = {
            key: torch.empty(value.size, dtype=value.dtype.torch)
            for key, value in dcp_metadata.read(folder).items()
        }
        fill(folder, tensors)
        _READ[key] = {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}
    return _READ[key]


Outlook = tuple[Any, str, str]
"""What a job would continue with, what it says, and whether the run is another one."""


def outlook(output: Path, digest: str, read: Callable[[Path], Any]) -> Outlook:
    """Read the newest whole checkpoint of a run; `digest` is of the run as it is configured now.

    Raises:
        UserError: no checkpoint is whole.
    """
    state, said = newest_state(output)
    while state:
        folder = output / f"global_step{state.step}"
        try:
            values = tensor_bytes(folder)
        except UserError as error:
            said += f"{error}"
            state = state_before(output, state)
            continue
        changed = "says so" if digest != state.digest else ""
        return (state.to_json(), values, read(folder)), said, changed
    if said:
        raise UserError(said)
    return None, "", "starts again"


def sweep_run(
    root: Path,
    look: Callable[[], Outlook],
    *,
    files: Iterable[Path],
    names: Callable[[Path], Iterable[Path]],
    group: Callable[[Path], str],
    faults_a_file: int,
    inject: Inject,
) -> Counts:
    """Damage files of a finished run in the folder `root`; see `sweep`.

    `look` reads all that a job reads before it continues. An error names one of the paths `names`.
    """
    expected, said, changed = look()
    assert not said + changed

    def outcome(path: Path) -> str:
        try:
            found, said, changed = look()
        except UserError as error:
            # run.yaml names other files, and the message names the one that is missing.
            is_named = any(str(name) in str(error) for name in names(path))
            return "refused" if is_named or path.name == "run.yaml" else f"unnamed: {error}"
        if changed:
            return changed
        # A person may let `latest` name an earlier checkpoint: the same steps follow again.
        if said or (path.name == "latest" and found[0]["step"] < expected[0]["step"]):
            return "goes back"
        return "harmless" if found == expected else "silent"

    counts = sweep(
        files,
        outcome,
        everything=[path for path in sorted(root.rglob("*")) if path.is_file()],
        group=group,
        faults_a_file=faults_a_file,
        inject=inject,
    )
    print(table(counts))
    return counts
