"""Training steps on the stand-in accelerator and on the CPU: their numbers, and what they cost."""

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support import standin_use
from tests.support.composition_axes import axes
from tests.support.compositions import Composition, learners
from tests.support.layouts import laid_out
from tests.support.standin_costs import Costs, counted, live_bytes
from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.prove.plain_training import rates
from tokamake.prove.random_samples import rank_ids, rank_samples, step_samples
from tokamake.runtime.ranks import Ranks
from tokamake.train.numerics import with_precision

CPU = torch.device("cpu")
NUM_STEPS = 2
NUM_BATCHES = 2
"""Micro batches of a step."""
Values = dict[str, Any]
"""Values of axes of compositions that do not have their defaults."""
APART: Values = {"reset_attention_mask": True, "reset_position_ids": True}
BF16: Values = {"precision": "bf16"}
CAPACITY: Values = {"router.capacity_factor": 1.0}

# ---- Runs of one rank ----

CHANGES: dict[str, Values] = {
    "bf16": BF16,
    "recomputation": {"recompute_granularity": "full"},
    "document masks": APART,
    "document masks, bf16": {**BF16, **APART},
    "norms of layers": {"log_layer_norms": True},
    "losses of corpora": {"log_corpus_losses": True},
    "dropout": {"dropout.hidden": 0.1, "dropout.attention": 0.1},
    **{name: {"optimizer.name": name} for name in axes()["optimizer.name"]},
}
"""Changes of a causal run whose code differs on a device."""
RUNS: dict[str, tuple[str, str, Values]] = {
    **{f"{family} {objective}": (family, objective, {}) for family, objective in learners()},
    "mixtral causal, bf16": ("mixtral", "causal", BF16),  # a kernel for products of experts
    "gpt_oss causal, bf16": ("gpt_oss", "causal", BF16),  # its experts have biases
    **{f"llama causal, {change}": ("llama", "causal", of) for change, of in CHANGES.items()},
    "mixtral causal, capacity": ("mixtral", "causal", CAPACITY),
    "mixtral causal, capacity, bf16": ("mixtral", "causal", CAPACITY | BF16),
    "deepseek_v3 causal, further tokens": (
        *("deepseek_v3", "causal"),
        {"architecture.num_nextn_predict_layers": 1, **BF16},
    ),
    "bert masked, packed": ("bert", "masked", {"pack_samples": True}),
}
"""Family, objective and settings: each family with each objective that it learns, and variants."""
PARTS = 4


class Trained(NamedTuple):
    """Some steps of training."""

    numbers: list[float]
    """Losses and norms of gradients, and the loss of a validation after them."""
    costs: Costs
    """Of the last step."""
    live: tuple[int, int]
    """Bytes on the device after the last but one step, and after the last one."""


def train(run: Run, device: torch.device) -> Trained:
    engine = engine_of(run, device)
    objective, mesh = engine.stages.objective, engine.mesh

    def validate() -> float:
        rows = rank_samples(step_samples(objective, step=NUM_STEPS), mesh)
        return float(engine.validate(iter(rows)).loss)

    numbers, bytes_after = list[float](), [0]
    for step in range(NUM_STEPS):
        rows = rank_samples(step_samples(objective, step=step), mesh)
        ids = rank_ids(objective, mesh, step=step)
        with counted() as costs:
            done = engine.train_step(rows, samples=ids, **rates(run, step))
        numbers += [done.loss, done.grad_norm]
        bytes_after.append(live_bytes())
    numbers.append(validate())
    return Trained(numbers, costs, (bytes_after[-2], bytes_after[-1]))


def engine_of(run: Run, device: torch.device) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(rank, size, rank, size)
    backend = plugins.load("train/backends", run.train.backend)
    return backend.Engine(with_precision(run, device), ranks, device=device)


def waits_of_experts(run: Run) -> int:
    """Waits of a step for numbers of rows, which the host must know.

    Each layer with experts waits once for each micro batch: for products without a kernel, for the
    number of choices that a capacity keeps, or for the rows that ranks exchange.
    """
    train = run.train
    has_kernel = train.precision == "bf16"
    needs_numbers = train.router.capacity_factor is not None
    if has_kernel and not needs_numbers and train.parallel.expert_parallel_size == 1:
        return 0
    return len(run.architecture.expert_layers) * NUM_BATCHES


def train_on_both(part: int) -> dict[str, tuple[Trained, Trained]]:
    """Train the runs of a part on the CPU and on the stand-in."""
    device = standin_use.use()
    runs = {name: one_rank(name) for name in RUNS if part_of(name) == part}
    return {name: (train(run, CPU), train(run, device)) for name, run in runs.items()}


def part_of(run: str) -> int:
    """Part of a run, of `PARTS`; the runs of a part share a process, whose first steps are slow."""
    return [*RUNS].index(run) * PARTS // len(RUNS)


def one_rank(name: str) -> Run:
    return Composition(*RUNS[name], seed=5).run()


# ---- Extra passes of an optimizer ----

PASSES: dict[str, Values] = {
    "labels drawn": {},
    "labels drawn, unequal labels": {"eod_mask_loss": True},
}
"""Changes of a causal Llama whose optimizer makes an extra pass in each step."""


def train_with_passes() -> dict[str, tuple[Trained, Trained]]:
    """Train the runs of `PASSES` on both."""
    device = standin_use.use()
    trained = {}
    for name, values in PASSES.items():
        run = Composition("llama", "causal", {"optimizer.name": "sophia_g", **values}, 5).run()
        settings = run.train.optimizer.model_dump(exclude_unset=True)
        run = laid_out(run, {"optimizer": {**settings, "hessian_interval": 1}})
        trained[name] = (train(run, CPU), train(run, device))
    return trained


# ---- Layouts of two ranks, and DeepSpeed ----

_DATA, _TENSOR, _CONTEXT, _PIPELINE = (
    "data_parallel_size",
    *(f"parallel.{each}_parallel_size" for each in ("tensor", "context", "pipeline")),
)
_EXPERTS: Values = {
    _DATA: 2,
    "parallel.expert_parallel_size": 2,
    "architecture.num_experts": 4,
}
LAYOUTS: dict[str, tuple[str, Values]] = {
    **{f"ZeRO {stage}": ("llama", {_DATA: 2, "zero_stage": stage}) for stage in range(4)},
    "TP, SP": ("llama", {_TENSOR: 2, "parallel.sequence_parallel": True}),
    "CP, ulysses": ("llama", {_CONTEXT: 2, "parallel.context_parallel_method": "ulysses"}),
    "CP, ring, document masks": ("llama", {_CONTEXT: 2, **APART}),
    "PP, 1F1B": ("llama", {_PIPELINE: 2, "parallel.pipeline_schedule": "1f1b"}),
    "PP, interleaved, document masks, bf16": (
        "llama",
        {
            _PIPELINE: 2,
            "parallel.pipeline_schedule": "interleaved_1f1b",
            "parallel.virtual_pipeline_size": 2,
            **APART,
            **BF16,
        },
    ),
    "EP, bf16": ("mixtral", _EXPERTS | BF16),
    "EP, capacity": ("mixtral", _EXPERTS | CAPACITY),
}
"""Family and settings of causal runs of the native back end on two ranks."""


def layout(name: str) -> Run:
    family, values = LAYOUTS[name]
    return Composition(family, "causal", values, seed=5).run()


def train_layouts() -> dict[str, tuple[Trained, Trained]]:
    """Train each layout on CPUs and on stand-ins; all ranks call it."""
    device = standin_use.use()
    runs = {name: layout(name) for name in LAYOUTS}
    return {name: (train(run, CPU), train(run, device)) for name, run in runs.items()}


def train_by_deepspeed(stages: list[int]) -> list[Trained]:
    """Train a causal Llama by DeepSpeed, whose accelerator is one for the whole process."""
    os.environ["LOCAL_RANK"] = "0"
    device = standin_use.use_with_deepspeed()
    values = [{"backend": "deepspeed", "zero_stage": stage} for stage in stages]
    return [train(Composition("llama", "causal", each, seed=5).run(), device) for each in values]
