"""Ranks that share a model read, or draw, only their chunks of the initial weights."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.deepspeed_runs import BF16, zero
from tests.support.engines import build, coming, go, parts, states, whole
from tests.support.grids import split_layouts
from tests.support.layouts import laid_out, parallel
from tests.support.proofs import Changes, Proved
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.runs import make_run
from tests.support.tied_start import SAVED, TIED, prepare_tied
from tokamake import files
from tokamake.checkpoint.native.dcp_storage import DcpReader
from tokamake.checkpoint.native.folder import DESCRIPTION
from tokamake.config.resolved_run import read_run
from tokamake.prove.engine_tensors import buffer, fragments
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints import first_weights
from tokamake.train.checkpoints.first_weights import weights_digest


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tied(tmp_path_factory.mktemp("start"))


def weights(engine: Any) -> list[Any]:
    return [part for fragment in fragments(engine) for part in parts(fragment, buffer(fragment))]


PIPELINE = parallel(pp=2)
LAYOUTS: Proved = {
    2: [
        ("tied", {"zero_stage": 0}),
        ("tied", {"zero_stage": 3}),
        ("tied", BF16),
        ("tied", parallel(tp=2, sp=True)),
        ("tied", PIPELINE),
        ("tied", parallel(pp=2, schedule="zbv", vpp=2)),
        *[("tied", zero(stage)) for stage in range(4)],
        ("tied", zero(2, **BF16)),
        ("tied", zero(3, **BF16) | parallel(tp=2)),
        ("tied", zero(1) | PIPELINE),
    ],
}
"""By number of ranks: name of the model and settings."""


class ReadCounter:
    """Counts the elements of each tensor that this rank reads."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        read = DcpReader.read_data

        def read_data(reader: Any, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                name = item.dest_index.fqn.removeprefix("model.")
                self.counts[name] = self.counts.get(name, 0) + item.lengths.numel()
            return read(reader, plan, planner)

        DcpReader.read_data = read_data  # type: ignore[method-assign]


def begin_all(config: Path, folder: Path, layouts: list[tuple[str, Changes]]) -> list[Any]:
    """Start at each layout: from one file, from files of two ranks, from random weights.

    Returns:
        Weights of this rank, counts of read elements, validation loss of each start.
    """
    run, counter, results = read_run(config), ReadCounter(), []
    engine = build(laid_out(run, parallel(tp=2)))
    engine.save(folder / SAVED, {"iteration": 2}).wait()
    if dist.get_rank() == 0:
        (folder / "latest").write_text(SAVED)
    dist.barrier()
    for _, changes in layouts:
        for start in (run.checkpoint, folder, None):
            counter.counts.clear()
            started = run.model_copy(update={"checkpoint": start, "seed": 5})
            engine = build(laid_out(started, changes))
            first = next(coming(engine, run)).micro_batches
            loss = engine.validate(iter(first)).loss
            results.append((weights(engine), {**counter.counts}, loss))
    return results


def of_second_stage(name: str) -> bool:
    """Whether a tensor belongs to the second of two pipeline ranks under 1F1B."""
    return name.startswith(("model.layers.2.", "model.layers.3.", "model.norm.", "model.embed"))


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "layouts"), split_layouts(LAYOUTS))
def test_ranks_read_or_draw_only_their_chunks(
    world_size: int, layouts: list[tuple[str, Changes]], root: Path, tmp_path: Path
) -> None:
    config = make_run(root, "layouts", micro_batch_size=4)
    of_ranks = spawn(begin_all, world_size, config, tmp_path, layouts)
    expected = random_tensors(TIED, 5)
    for number, of_ranks_at_layout in enumerate(zip(*of_ranks, strict=True)):
        (_, changes), is_drawn = layouts[number // 3], number % 3 == 2
        tensors = whole(parts for parts, _, _ in of_ranks_at_layout)
        assert tensors.keys() == expected.keys(), changes
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), (name, changes)
        for rank, (held, read, loss) in enumerate(of_ranks_at_layout):
            # The passes use these weights.
            rel = 1e-2 if "precision" in changes else 1e-5
            assert loss == pytest.approx(of_ranks[0][0][2], rel=rel), changes
            if is_drawn:
                assert not read
                continue
            assert read.keys() == {name for name, *_ in held}, changes
            if PIPELINE.items() <= changes.items():
                second = {name for name in expected if of_second_stage(name)}
                first = expected.keys() - second | {"model.embed_tokens.weight"}
                assert read.keys() == (second if rank else first), changes
            sizes = dict.fromkeys(read, 0)
            for name, _, _, part in held:
                sizes[name] += part.numel()
            assert {name: size for name, size in sizes.items() if size} == read, changes


def hash_files(folder: Path) -> tuple[str, list[str]]:
    """Digest of a checkpoint, and the files that this rank has hashed for it."""
    hashed, hashes = list[str](), first_weights._hashes

    def record(paths: list[Path]) -> Any:
        hashed.extend(path.name for path in paths)
        return hashes(paths)

    first_weights._hashes = record
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), 0, 1)
    return weights_digest(folder, ranks), hashed


@pytest.mark.ranks
def test_ranks_share_the_hashing_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text("{}")
    contents = {"__0_0.distcp": b"a", "__1_0.distcp": b"abc", "__2_0.distcp": b"ab"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    expected = files.digest([hashlib.sha256(content).hexdigest() for content in contents.values()])
    assert spawn(hash_files, 2, tmp_path) == [
        (expected, ["__1_0.distcp", "__0_0.distcp"]),
        (expected, ["__2_0.distcp"]),
    ]


CONTINUED: list[dict[str, Any]] = [
    {},
    BF16,
    *[{"optimizer": {"name": n, "learning_rate": 0.01}} for n in ("adafactor", "muon")],
    {"optimizer": {"name": "schedule_free_adamw", "learning_rate": 0.01}},
    *[zero(stage) for stage in range(4)],
    *[zero(stage, **BF16) for stage in (1, 2, 3)],
    *[
        zero(stage, optimizer={"name": "schedule_free_adamw", "learning_rate": 0.01})
        for stage in (1, 3)
    ],
]
PIPELINED = [PIPELINE, {"zero_stage": 3, **BF16}, zero(1, **BF16) | PIPELINE]


def continue_all(config: Path, folder: Path, layouts: list[dict[str, Any]]) -> list[Any]:
    """Losses of steps after saving, and after loading into a model full of NaN."""
    results = []
    for number, changes in enumerate(layouts):
        constant = {"schedule": {"name": "constant"}, **changes}
        run, saved = laid_out(read_run(config), constant), folder / f"{number}"
        engine = build(run)
        steps = coming(engine, run)
        go(engine, steps, 2)
        engine.save(saved, {"iteration": 2}).wait()
        expected = go(engine, steps, 2)
        missing = run.model_copy(update={"checkpoint": folder / "missing"})
        # torch then fills new memory with NaN.
        torch.use_deterministic_algorithms(True)
        engine = build(missing, continues=True)
        torch.use_deterministic_algorithms(False)
        held = torch.cat([part.flatten().float() for *_, part in weights(engine)])
        assert held.isnan().all()
        engine.load(saved)
        assert not any(value.isnan().any() for value in states(engine).values())
        results.append((expected, go(engine, coming(engine, run, done=2), 2)))
    return results


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "layouts"), [(1, CONTINUED), (2, PIPELINED)])
def test_resuming_needs_no_initial_weights(
    root: Path, tmp_path: Path, world_size: int, layouts: list[dict[str, Any]]
) -> None:
    config = make_run(root, f"poisoned-{world_size}")
    for of_rank in spawn(continue_all, world_size, config, tmp_path, layouts):
        for changes, (expected, resumed) in zip(layouts, of_rank, strict=True):
            assert resumed == expected, changes
