"""Ranks send no more bytes than the papers of their layouts say; the table of the docs is current.

Run as a module, it rewrites the table: python -m tests.train.backends.test_traffic
"""

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.deepspeed_runs import BF16, zero
from tests.support.engines import build, coming
from tests.support.layout_table import DOCUMENT, settings
from tests.support.layouts import Layout, laid_out, parallel
from tests.support.proofs import STARTS, Changes, make_start
from tests.support.ranks import spawn
from tests.support.traffic import WireBytes
from tokamake.checkpoint import model_tensors
from tokamake.config.resolved_run import read_run

COMMAND = "python -m tests.train.backends.test_traffic"
SHAPE = STARTS["untied"]
SHAPES = model_tensors.shapes(SHAPE)
PARAMETERS = sum(map(math.prod, SHAPES.values()))
MATRICES = sum(math.prod(s) for name, s in SHAPES.items() if ".layers." in name and len(s) == 2)
EMBEDDING = SHAPE.vocab_size * SHAPE.hidden_size
ROWS, LENGTH, MICRO = 8, 16, 2
LAYERS, HIDDEN = SHAPE.num_hidden_layers, SHAPE.hidden_size
KEYS = SHAPE.num_key_value_heads * SHAPE.head_dim
WIDTH = 4
"""Bytes of a number: all that is sent is in fp32, if the name of the layout says nothing else."""


class Case(NamedTuple):
    """A layout, and the bytes that all ranks together send in a step."""

    name: str
    ranks: int
    changes: Changes
    formula: Callable[["Case"], float]
    factor: float = 1.0
    """What is sent, as a multiple of the formula, if it is not that."""
    start: str = "untied"
    """Initial checkpoint."""

    @property
    def recomputes(self) -> bool:
        return settings(self.changes).recompute_granularity == "full"

    @property
    def num_micro_batches(self) -> int:
        parallel = settings(self.changes).parallel
        return ROWS // MICRO // parallel.data_parallel_size(self.ranks)


def of_data(case: Case) -> float:
    """ZeRO (1910.02054): 2 times the parameters; 3 in stage 3, for each micro batch.

    With several micro batches, stage 2 reduces gradients after each of them. Gradients are fp32.
    """
    train = settings(case.changes)
    sharers = train.parallel.data_parallel_size(case.ranks) * train.parallel.context_parallel_size
    replicas = train.parallel.data_parallel_replicate_size
    n, m = sharers // replicas, case.num_micro_batches
    gradients, weights = {0: (2, 0), 1: (1, 1), 2: (m, 1), 3: (m, 2 * m)}[train.zero_stage]
    times = WIDTH * gradients + (2 if train.precision == "bf16" else WIDTH) * weights
    between = WIDTH * 2 * (replicas - 1) * m * PARAMETERS
    return replicas * times * (n - 1) * PARAMETERS + between


def of_tensor(case: Case) -> float:
    """Megatron-LM (1909.08053): four all-reduces a layer, one each for embedding and output.

    Full recompute repeats the two of the forward pass. More ranks than key and value heads
    replicate these, and add up the gradients of their weights.
    """
    n = settings(case.changes).parallel.tensor_parallel_size
    states = ((6 if case.recomputes else 4) * LAYERS + 2) * ROWS * LENGTH * HIDDEN
    replicated = 2 * LAYERS * HIDDEN * KEYS if n > SHAPE.num_key_value_heads else 0
    return WIDTH * 2 * (n - 1) * (states + replicated)


def of_pipeline(case: Case) -> float:
    """2104.04473: states and their gradients between neighbouring stages.

    Each tensor-parallel rank sends them, or its part of the sequence. In a V (2401.10241), the two
    middle stages are on one rank.
    """
    parallel = settings(case.changes).parallel
    senders = 1 if parallel.sequence_parallel else parallel.tensor_parallel_size
    borders = parallel.num_stages - (2 if parallel.pipeline_schedule == "zbv" else 1)
    return WIDTH * senders * borders * 2 * ROWS * LENGTH * HIDDEN


def of_tied(case: Case) -> float:
    """Megatron-LM: an all-reduce of the embedding's gradient over the first and last stage.

    Shards over data-parallel ranks are reduced before.
    """
    return WIDTH * 2 * EMBEDDING


def of_muon(case: Case) -> float:
    """2502.16982: all R ranks that hold parts of a hidden matrix gather it in bf16."""
    holders, copies = holders_and_copies(case)
    return 2 * MATRICES * copies * (holders - 1)


def of_owners(case: Case) -> float:
    """What is sent in place of `of_muon`, 2/R of it: each number to its owner and back, in bf16."""
    holders, copies = holders_and_copies(case)
    return 2 * 2 * MATRICES * copies * (holders - 1) / holders


def holders_and_copies(case: Case) -> tuple[int, int]:
    """Ranks that divide a hidden matrix, and copies of it."""
    train = settings(case.changes)
    sharers = train.parallel.data_parallel_size(case.ranks) * train.parallel.context_parallel_size
    shards = sharers // train.parallel.data_parallel_replicate_size if train.zero_stage else 1
    return shards * train.parallel.tensor_parallel_size, sharers // shards


def of_ring(case: Case) -> float:
    """Ring attention (2310.01889): keys and values twice, their gradients once around the ring.

    Full recompute sends keys and values a third time.
    """
    n = settings(case.changes).parallel.context_parallel_size
    passes = 3 if case.recomputes else 2
    return WIDTH * LAYERS * (2 * passes * (n - 1) + 2 * n) * ROWS * LENGTH * KEYS


def of_ulysses(case: Case) -> float:
    """DeepSpeed-Ulysses (2309.14509): queries, keys, values and outputs, forward and backward."""
    n = settings(case.changes).parallel.context_parallel_size
    return WIDTH * LAYERS * 2 * (2 * HIDDEN + 2 * KEYS) * ROWS * LENGTH * (n - 1) / n


def total(*formulas: Callable[[Case], float]) -> Callable[[Case], float]:
    return lambda case: sum(formula(case) for formula in formulas)


def muon(name: str, ranks: int, changes: Changes, *others: Callable[[Case], float]) -> Case:
    """A case with Muon, whose owners send less than the gather of its paper."""
    optimizer = {"optimizer": {"name": "muon", "learning_rate": 0.001}}
    case = Case(f"Muon, {name}", ranks, {**changes, **optimizer}, total(*others, of_muon))
    return case._replace(factor=total(*others, of_owners)(case) / case.formula(case))


ULYSSES = {"method": "ulysses"}
INTERLEAVED = {"vpp": 2, "schedule": "interleaved_1f1b"}
ZERO_BUBBLE = {"vpp": 2, "schedule": "interleaved_zero_bubble"}
V = {"vpp": 2, "schedule": "zbv"}
FULL = {"recompute_granularity": "full"}
CASES = [
    Case("data 2", 2, {"zero_stage": 0}, of_data),
    Case("ZeRO 1, data 2", 2, {"zero_stage": 1}, of_data),
    Case("ZeRO 1, data 2, bf16", 2, {"zero_stage": 1} | BF16, of_data),
    Case("ZeRO 2, data 2", 2, {"zero_stage": 2}, of_data),
    Case("ZeRO 3, data 2", 2, {"zero_stage": 3}, of_data),
    Case("ZeRO 1, data 4", 4, {"zero_stage": 1}, of_data),
    Case("ZeRO 3, 2 copies of data 2 (HSDP)", 4, {"zero_stage": 3} | parallel(replicas=2), of_data),
    Case("tensor 2", 2, parallel(tp=2), of_tensor),
    Case("tensor 2, sequence", 2, parallel(tp=2, sp=True), of_tensor),
    Case("tensor 4", 4, parallel(tp=4), of_tensor),
    Case("context 2, ring", 2, parallel(cp=2), total(of_data, of_ring)),
    Case("context 4, ring", 4, parallel(cp=4), total(of_data, of_ring)),
    Case("context 2, ulysses", 2, parallel(cp=2, **ULYSSES), total(of_data, of_ulysses)),
    Case("pipeline 2, GPipe", 2, parallel(pp=2, schedule="gpipe"), of_pipeline),
    Case("pipeline 2, 1F1B", 2, parallel(pp=2), of_pipeline),
    Case("pipeline 2, 1F1B, tied", 2, parallel(pp=2), total(of_pipeline, of_tied), start="tied"),
    Case("pipeline 2 × 2, interleaved", 2, parallel(pp=2, **INTERLEAVED), of_pipeline),
    Case("pipeline 2 × 2, zero bubble", 2, parallel(pp=2, **ZERO_BUBBLE), of_pipeline),
    Case("pipeline 2 × 2, ZBV", 2, parallel(pp=2, **V), of_pipeline),
    Case("pipeline 4, 1F1B", 4, parallel(pp=4), of_pipeline),
    Case("data 2 × tensor 2", 4, parallel(tp=2), total(of_data, of_tensor)),
    Case("data 2 × pipeline 2", 4, parallel(pp=2), total(of_data, of_pipeline)),
    Case("pipeline 2 × tensor 2", 4, parallel(tp=2, pp=2), total(of_tensor, of_pipeline)),
    Case(
        "pipeline 2 × tensor 2, sequence",
        4,
        parallel(tp=2, pp=2, sp=True),
        total(of_tensor, of_pipeline),
    ),
    Case("context 2, ring × tensor 2", 4, parallel(cp=2, tp=2), total(of_data, of_ring, of_tensor)),
    Case("ZeRO 3, data 2, full recompute", 2, {"zero_stage": 3} | FULL, of_data),
    # The recompute ends before a layer's last all-reduce: 20 + 2 of 24 + 2.
    Case("tensor 2, full recompute", 2, parallel(tp=2) | FULL, of_tensor, factor=22 / 26),
    Case("context 2, ring, full recompute", 2, parallel(cp=2) | FULL, total(of_data, of_ring)),
    Case("data 4 × tensor 2", 8, parallel(tp=2), total(of_data, of_tensor)),
    Case(
        "ZeRO 3, data 2 × context 2, ring × tensor 2",
        8,
        {"zero_stage": 3} | parallel(cp=2, tp=2),
        total(of_data, of_ring, of_tensor),
    ),
    Case(
        "data 2 × pipeline 2 × tensor 2, sequence",
        8,
        parallel(pp=2, tp=2, sp=True),
        total(of_data, of_pipeline, of_tensor),
    ),
    muon("ZeRO 1, data 2", 2, {}, of_data),
    muon("ZeRO 1, data 4", 4, {}, of_data),
    muon("tensor 2", 2, parallel(tp=2), of_tensor),
    muon("data 2 × tensor 2", 4, parallel(tp=2), of_data, of_tensor),
    muon("data 4 × tensor 2", 8, parallel(tp=2), of_data, of_tensor),
    muon(
        "data 2 × pipeline 2 × tensor 2",
        8,
        parallel(pp=2, tp=2),
        of_data,
        of_pipeline,
        of_tensor,
    ),
    Case("DeepSpeed, ZeRO 0, data 2", 2, zero(0), of_data),
    Case("DeepSpeed, ZeRO 1, data 2", 2, zero(1), of_data),
    Case("DeepSpeed, ZeRO 1, data 4", 4, zero(1), of_data),
    Case("DeepSpeed, ZeRO 1, data 2, bf16", 2, zero(1) | BF16, of_data),
    Case(
        "DeepSpeed, ZeRO 1, data 2 × pipeline 2",
        4,
        zero(1) | parallel(pp=2),
        total(of_data, of_pipeline),
    ),
    Case("DeepSpeed, ZeRO 2, data 2", 2, zero(2), of_data),
    # It keeps small weights gathered between the passes.
    Case("DeepSpeed, ZeRO 3, data 2", 2, zero(3), of_data, factor=0.5),
]


def send_all(layouts: list[Layout]) -> list[int]:
    """Bytes that this rank sends in the second step of each layout."""
    sent = []
    for config, changes in layouts:
        run = laid_out(read_run(config), changes)
        engine = build(run)
        steps = coming(engine, run)
        rates = {"learning_rate": 0.01, "weight_decay": 0.1}
        engine.train_step(next(steps).micro_batches, **rates)
        batches = next(steps).micro_batches
        with WireBytes() as wire:
            engine.train_step(batches, **rates)
        sent.append(sum(wire.sent.values()))
    return sent


def measure(root: Path) -> dict[str, int]:
    """Bytes that all ranks send in a step, by the name of the layout."""
    configs, measured = {start: make_start(root / start, start) for start in ("untied", "tied")}, {}
    for ranks in (2, 4, 8):
        cases = [case for case in CASES if case.ranks == ranks]
        layouts = [Layout(configs[case.start], case.changes) for case in cases]
        of_ranks = spawn(send_all, ranks, layouts)
        for case, *sent in zip(cases, *of_ranks, strict=True):
            measured[case.name] = sum(sent)
    return measured


def row(case: Case, sent: int) -> str:
    formula = case.formula(case)
    shares = f"{sent / case.ranks / 1000:.1f} | {formula / case.ranks / 1000:.1f}"
    return f"| {case.name} | {case.ranks} | {shares} | {sent / formula:.2f} |\n"


def document(measured: dict[str, int]) -> str:
    """The document with a new table."""
    header = "| Layout | Ranks | kB sent | kB of the formula | Ratio |\n|---|---|---|---|---|\n"
    table = header + "".join(row(case, measured[case.name]) for case in CASES)
    between = re.compile(
        f"(?<=<!-- begin traffic: {COMMAND} -->\n).*?(?=<!-- end traffic -->)", re.DOTALL
    )
    text, count = between.subn(lambda _: f"\n{table}\n", DOCUMENT.read_text(encoding="utf-8"))
    assert count == 1
    return text


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return measure(tmp_path_factory.mktemp("traffic"))


@pytest.mark.grid
@pytest.mark.ranks
def test_ranks_send_what_the_papers_say(measured: dict[str, int]) -> None:
    for case in CASES:
        ratio = measured[case.name] / case.formula(case)
        assert 0.95 * case.factor < ratio < 1.05 * case.factor, (case.name, ratio)


@pytest.mark.grid
@pytest.mark.ranks
def test_the_table_of_the_docs_is_current(measured: dict[str, int]) -> None:
    assert document(measured) == DOCUMENT.read_text(encoding="utf-8"), f"rewrite it: {COMMAND}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sent: Any = measure(Path(folder))
    DOCUMENT.write_text(document(sent), encoding="utf-8")
