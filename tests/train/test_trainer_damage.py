"""Random damage to the kept files of a run: nothing that decides its weights changes silently.

Each fault damages one file. Then everything is read that a job reads before it continues: settings,
data, index and checkpoints. The outcome is one of `OUTCOMES`; `silent` fails.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.faults import Inject
from tests.support.runs import make_run, prepare, train_here
from tokamake.checkpoint.native.folder import check_files
from tokamake.checkpoint.native.training_state import fill, saved_in
from tokamake.config.resolved_run import read_run
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.open_samples import open_samples
from tokamake.errors import UserError
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints.resume import state_before
from tokamake.train.checkpoints.resume_state import newest_state
from tokamake.train.checkpoints.run_digest import initial_digest, run_digest
from tokamake.train.data_verification import verify_data
from tokamake.train.numerics import with_precision

OUTCOMES = ("refused", "goes back", "says so", "starts again", "harmless", "silent")
"""With the name of the file; to the checkpoint before, in a line; a changed setting, which
`train.on_change` decides; training begins at step 0; the same weights follow; other weights follow.
"""
FAULTS_A_FILE = 91
ALONE = Ranks(0, 1, 0, 1)
Damage = Callable[[random.Random, Path, list[Path]], None]

pytestmark = pytest.mark.usefixtures("lone_rank")


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


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, lone_rank: None) -> Path:
    """A finished run of 6 steps, with checkpoints at 2, 4 and 6."""
    path = make_run(prepare(tmp_path_factory.mktemp("damage")), "run")
    assert train_here(path) == 0
    return path


def outlook(config: Path) -> tuple[Any, str, str]:
    """What a job would continue with, what it says, and whether the run is another one.

    Raises:
        UserError: as the job would.
    """
    run = with_precision(read_run(config), torch.device("cpu"))
    index = read_index(run.index)
    for split in index["splits"]:
        open_samples(run.index, split=split, data_root=run.data_root)
    verify_data(run, ALONE, index)
    digest = run_digest(
        run,
        index=index,
        weights=initial_digest(run, ALONE, note=config.with_name(".training.start")),
    )
    state, said = newest_state(run.output)
    while state:
        folder = run.output / f"global_step{state.step}"
        try:
            check_files(folder)
            tensors = {
                key: torch.empty(value.size, dtype=value.dtype.torch)
                for key, value in saved_in(folder).items()
            }
            fill(folder, tensors, alone=True)
        except UserError as error:
            said += f"{error}"
            state = state_before(run.output, state)
            continue
        values = {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}
        changed = "says so" if digest != state.digest else ""
        return (state.to_json(), values, index["digest"]), said, changed
    if said:
        raise UserError(said)
    return None, "", "starts again"


def outcome(config: Path, path: Path, expected: Any) -> str:
    try:
        found, said, changed = outlook(config)
    except UserError as error:
        # The name of the file, its folder, its dataset, or the file that names it.
        names = {str(path), str(path.parent), str(path.with_suffix("")), str(config.parents[1])}
        # run.yaml names other files, and the message names the one that is missing.
        is_named = path.name == "run.yaml" or any(name in str(error) for name in names)
        return "refused" if is_named else f"unnamed: {error}"
    if changed:
        return changed
    # A person may let `latest` name an earlier checkpoint: the same steps follow again.
    if said or (path.name == "latest" and found[0]["step"] < expected[0]["step"]):
        return "goes back"
    return "harmless" if found == expected else "silent"


def kept_files(root: Path) -> Iterator[Path]:
    """Files that are read, or could be: of the checkpoints, the newest."""
    for path in sorted(root.rglob("*")):
        is_earlier = {"global_step2", "global_step4"} & {*path.parts}
        if path.is_file() and not is_earlier and "tensorboard" not in path.parts:
            yield path


def group(path: Path, root: Path) -> str:
    """Row of the table of docs/explanation/reliability.md."""
    name = path.relative_to(root).as_posix()
    if "global_step" in name:
        return f"{'start' if name.startswith('start') else 'checkpoint'}: {path.name}"
    return name


def sweep(config: Path, faults_a_file: int, inject: Inject) -> dict[str, Counter[str]]:
    root, rng = config.parents[1], random.Random(53)
    expected, said, changed = outlook(config)
    assert not said + changed
    everything = [path for path in sorted(root.rglob("*")) if path.is_file()]
    counts = dict[str, Counter[str]]()
    for path in [*kept_files(root)]:
        content, stat = path.read_bytes(), path.stat()
        for number in range(faults_a_file):
            inject()
            damage = DAMAGES[(number + len(counts)) % len(DAMAGES)]
            damage(rng, path, everything)
            found = outcome(config, path, expected)
            assert found in OUTCOMES[:-1], f"{path}: {damage.__name__}, {number}: {found}"
            counts.setdefault(group(path, root), Counter())[found] += 1
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return counts


def table(counts: dict[str, Counter[str]]) -> str:
    lines = [f"| file | faults | {' | '.join(OUTCOMES)} |", "|---|" + "---:|" * (len(OUTCOMES) + 1)]
    for name, outcomes in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        numbers = (outcomes.total(), *(outcomes[each] for each in OUTCOMES))
        lines.append(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |")
    return "\n".join(lines)


@pytest.mark.fault("damaged file")
@pytest.mark.parametrize("faults_a_file", [2, pytest.param(FAULTS_A_FILE, marks=pytest.mark.grid)])
def test_no_damage_is_silent(config: Path, faults_a_file: int, inject: Inject) -> None:
    counts = sweep(config, faults_a_file, inject)
    print(table(counts))
    assert sum(counts.values(), Counter()).total() >= faults_a_file * 22
    decisive = counts["checkpoint: state.json"] + counts["index/index.json"] + counts["corpus.idx"]
    assert decisive["refused"] + decisive["goes back"] > 0
