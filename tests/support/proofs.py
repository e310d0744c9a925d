"""Proofs of layouts: runs, what transformers and torch make of them, and how ours must compare."""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.engines import Part, whole
from tests.support.gpts import gpt, reference
from tests.support.layouts import NUM_STEPS, Found, Layout, rates, train_all
from tests.support.ranks import spawn
from tests.support.runs import ARCHITECTURE, make_run, prepare, write_start
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.hf import hf_folder
from tokamake.checkpoint.native import latest
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import Run, read_run
from tokamake.data.samples.loader import Samples

Changes = dict[str, Any]
"""Settings of the section `train` that differ."""

Proved = dict[int, list[tuple[str, Changes]]]
"""By number of ranks: which start, and which settings."""

# An odd vocabulary, so that its parts are uneven; more ranks than key-value heads at tp4.
SHAPE = {"num_hidden_layers": 4, "vocab_size": 121}
STARTS: dict[str, Architecture] = {
    name: ARCHITECTURE.model_copy(update=SHAPE | changes)
    for name, changes in {
        "untied": {},
        "tied": {"tie_word_embeddings": True},
        "mqa": {"num_key_value_heads": 1},
        "deep": {"num_hidden_layers": 8},
    }.items()
}
# Biases of keys move no softmax: their gradients are rounding alone, which AdamW blows up.
STARTS["gpt"] = gpt(
    **SHAPE,
    position_embedding="rotary",
    num_key_value_heads=2,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
)
SHALLOW = "shallow-"
"""Starts whose names begin so have half the layers, which is enough without a pipeline."""
STARTS |= {
    SHALLOW + name: shape.model_copy(update={"num_hidden_layers": 2})
    for name, shape in STARTS.items()
    if name != "deep"
}


def start_of(name: str, changes: Changes) -> str:
    """What a layout starts from: stages of a pipeline need layers, others are faster with few."""
    stages = changes.get("parallel", {}).get("pipeline_parallel_size", 1)
    return name if stages > 1 or name == "deep" else SHALLOW + name


SEEDS = {
    "tied": 5,
    "gpt": 8,
    SHALLOW + "untied": 10,
    SHALLOW + "tied": 8,
    SHALLOW + "mqa": 11,
    SHALLOW + "gpt": 6,
}
"""Of random weights, else 6. With others, rounding alone may come to move a gradient by 1e-5."""


def make_runs(folder: Path) -> dict[str, Path]:
    """A run.yaml for each start."""
    return {start: make_start(folder / start, start) for start in STARTS}


def make_start(root: Path, start: str) -> Path:
    """Make a folder with a start and a run.yaml from there, which is returned."""
    root.mkdir()
    prepare(root, train_samples=200)
    architecture = STARTS[start]
    (root / "start").rename(root / "other")
    weights = model_tensors.random(architecture, SEEDS.get(start, 6))
    write_start(root / "start", architecture, weights)
    return make_run(root, "run", train_steps=24, backend="native")


def check(world_size: int, layouts: list[tuple[str, Changes]], runs: dict[str, Path]) -> None:
    """Train at each layout and compare with one process: losses, norms, gradients, weights."""
    places = [Layout(runs[start_of(start, changes)], changes) for start, changes in layouts]
    of_ranks = spawn(train_all, world_size, places, timeout=900)
    problems = []
    for (start, changes), *founds in zip(layouts, *of_ranks, strict=True):
        config = runs[start_of(start, changes)]
        expected = plain_training(config, grows="rampup_batch_size" in changes)
        if problem := difference(founds, expected):
            problems.append(f"{start} {changes}: {problem}")
    assert not problems, "\n".join(problems)


def difference(founds: list[Found], theirs: Found) -> str:
    """What differs between the ranks' training and the expected; empty: nothing does."""
    for key in ("losses", "norms", "validation"):
        for found in founds:
            if not np.allclose(found[key], theirs[key], rtol=1e-5, atol=0):
                return f"{key} {found[key]}, expected {theirs[key]}"
    for number, expected in enumerate(theirs["gradients"]):
        parts = [found["gradients"][number] for found in founds]
        # AdamW divides small gradients by small ones: from then on single elements vary more.
        if problem := _differ(parts, expected, 1e-5, order=2 if number else torch.inf):
            return f"gradients of update {number}: {problem}"
    problem = _differ([found["weights"] for found in founds], theirs["weights"], 1e-4)
    return f"weights: {problem}" if problem else ""


def _differ(
    parts: list[list[Part]],
    expected: dict[str, torch.Tensor],
    most: float,
    *,
    order: float = torch.inf,
) -> str:
    """What differs between tensors, in parts on all ranks, and the expected; empty: nothing.

    Args:
        parts: of each rank.
        expected: whole tensors by name.
        most: how large the norm of a difference may be, in terms of the tensor's norm.
        order: of these norms; of infinity, that of the largest element.
    """
    try:
        ours = whole(parts)
    except AssertionError as error:
        return str(error)
    shapes, wanted = ({n: t.shape for n, t in each.items()} for each in (ours, expected))
    if shapes != wanted:
        return f"shapes {shapes}, expected {wanted}"
    for name, tensor in expected.items():
        apart, norm = (torch.linalg.vector_norm(t, order) for t in (ours[name] - tensor, tensor))
        if not apart <= most * norm:
            return f"{name} differs by {apart / norm:.1e} of its norm"
    return ""


@cache
def plain_training(config: Path, *, grows: bool) -> Found:
    """Train transformers' model with torch's AdamW in one process.

    Args:
        config: the run.yaml.
        grows: whether the first five batches are of 4 samples, as in rampup_batch_size (4, 4, 20).
    """
    run = read_run(config)
    model = _their_model(run)
    as_ours = partial(
        hf_folder.format_for(run.architecture).from_hf,
        run.architecture,
        names=[*model_tensors.shapes(run.architecture)],
    )
    named, batches = dict(model.named_parameters()), _batches(run, grows=grows)
    optimizer = _their_optimizer(named)
    found: Found = {"losses": [], "norms": [], "gradients": []}
    found["validation"] = loss_of(model, next(batches)).item()
    for number in range(NUM_STEPS):
        loss = loss_of(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(torch.nn.utils.clip_grad_norm_(named.values(), 0.5).item())
        found["gradients"].append(as_ours({n: p.grad.clone() for n, p in named.items()}))
        for group in optimizer.param_groups:
            group["lr"] = rates(number)["learning_rate"]
        optimizer.step()
    found["weights"] = as_ours({name: p.detach() for name, p in named.items()})
    return found


def _their_model(run: Run) -> Any:
    """Transformers' model with the weights that a run starts from."""
    from transformers import LlamaConfig, LlamaForCausalLM

    architecture, weights, _ = latest.read(run.checkpoint)
    if architecture.family == "gpt":
        model: Any = reference(architecture)
    else:
        values = architecture.model_dump(
            include={*LlamaConfig().to_dict()} & {*type(architecture).model_fields} - {"rope_theta"}
        )
        rope = {"rope_type": "default", "rope_theta": architecture.rope_theta}
        model = LlamaForCausalLM(LlamaConfig(**values, rope_parameters=rope))
    theirs = hf_folder.format_for(architecture).to_hf(architecture, weights)
    model.load_state_dict(theirs, strict=not architecture.tie_word_embeddings)
    return model


def _their_optimizer(named: dict[str, Any]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


def _batches(run: Run, *, grows: bool) -> Iterator[torch.Tensor]:
    """Tokens of global batches, one after the other."""
    samples = Samples(run.index, split="train", data_root=run.data_root)
    begin = 0
    while True:
        size = 4 if grows and begin < 20 else 8
        yield torch.from_numpy(np.stack([samples[begin + row] for row in range(size)]))
        begin += size


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss by transformers' model and torch."""
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
