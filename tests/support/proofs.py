"""Proofs of layouts: training at a layout equals training by transformers and torch."""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.engines import NamedChunk, whole
from tests.support.gpts import gpt, reference
from tests.support.hf_folder import from_hf, to_hf
from tests.support.layouts import (
    NUM_GROWING_STEPS,
    NUM_STEPS,
    Layout,
    RankResults,
    rates,
    train_all,
)
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.runs import ARCHITECTURE, make_run, prepare, read_weights, write_start
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import Run, read_run
from tokamake.data.samples.document_samples import DocumentSamples

Changes = dict[str, Any]
"""Settings of the section `train` that differ from the run.yaml."""

Proved = dict[int, list[tuple[str, Changes]]]
"""By number of ranks: name of the initial checkpoint, settings."""

# An odd vocabulary has uneven parts; at tp 4 there are more ranks than key-value heads.
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
# Biases of keys do not change a softmax: their gradients are rounding errors, which AdamW enlarges.
STARTS["gpt"] = gpt(
    **SHAPE,
    position_embedding="rotary",
    num_key_value_heads=2,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
)
SHALLOW = "shallow-"
"""Prefix of initial checkpoints with half the layers, enough without a pipeline."""
STARTS |= {
    SHALLOW + name: shape.model_copy(update={"num_hidden_layers": 2})
    for name, shape in STARTS.items()
    if name != "deep"
}


def start_of(name: str, changes: Changes) -> str:
    """Initial checkpoint of a layout: only a pipeline needs many layers, and few are faster."""
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
"""Seeds of random weights; the default is 6. With other seeds, rounding alone may move a gradient
by more than 1e-5."""


def make_runs(folder: Path) -> dict[str, Path]:
    """A run.yaml for each initial checkpoint."""
    return {start: make_start(folder / start, start) for start in STARTS}


def make_start(root: Path, start: str) -> Path:
    """Write a folder with an initial checkpoint; return the run.yaml of a run from there."""
    root.mkdir()
    prepare(root, train_samples=200)
    architecture = STARTS[start]
    (root / "start").rename(root / "other")
    weights = random_tensors(architecture, SEEDS.get(start, 6))
    write_start(root / "start", architecture, weights)
    return make_run(root, "run", train_steps=24, backend="native")


def check(world_size: int, layouts: list[tuple[str, Changes]], runs: dict[str, Path]) -> None:
    """Train at each layout and compare with one process: losses, norms, gradients, weights."""
    places = [Layout(runs[start_of(start, changes)], changes) for start, changes in layouts]
    of_ranks = spawn(train_all, world_size, places, timeout=900)
    problems = []
    for (start, changes), *results in zip(layouts, *of_ranks, strict=True):
        config = runs[start_of(start, changes)]
        expected = plain_training(config, grows="rampup_batch_size" in changes)
        if problem := difference(results, expected):
            problems.append(f"{start} {changes}: {problem}")
    assert not problems, "\n".join(problems)


def difference(results: list[RankResults], expected: RankResults) -> str:
    """First difference between the ranks' training and the expected one; empty: none."""
    for key in ("losses", "norms", "validation"):
        for result in results:
            if not np.allclose(result[key], expected[key], rtol=1e-5, atol=0):
                return f"{key} {result[key]}, expected {expected[key]}"
    for number, gradients in enumerate(expected["gradients"]):
        parts = [result["gradients"][number] for result in results]
        # AdamW divides small gradients by small ones: after the first update, elements vary more.
        if problem := _differ(parts, gradients, 1e-5, order=2 if number else torch.inf):
            return f"gradients of update {number}: {problem}"
    problem = _differ([result["weights"] for result in results], expected["weights"], 2e-4)
    return f"weights: {problem}" if problem else ""


def _differ(
    parts: list[list[NamedChunk]],
    expected: dict[str, torch.Tensor],
    most: float,
    *,
    order: float = torch.inf,
) -> str:
    """First difference between chunks on all ranks and whole expected tensors; empty: none.

    `most`: largest norm of a difference, relative to the tensor's norm; `order` of these norms.
    """
    try:
        tensors = whole(parts)
    except AssertionError as error:
        return str(error)
    shapes, expected_shapes = (
        {name: tensor.shape for name, tensor in named.items()} for named in (tensors, expected)
    )
    if shapes != expected_shapes:
        return f"shapes {shapes}, expected {expected_shapes}"
    for name, tensor in expected.items():
        apart, norm = (torch.linalg.vector_norm(t, order) for t in (tensors[name] - tensor, tensor))
        if not apart <= most * norm:
            return f"{name} differs by {apart / norm:.1e} of its norm"
    return ""


@cache
def plain_training(config: Path, *, grows: bool) -> RankResults:
    """Train transformers' model with torch's AdamW in one process.

    `grows`: the first five batches have 4 samples, as in rampup_batch_size (4, 4, 20).
    """
    run = read_run(config)
    model = their_model(run.checkpoint)
    as_ours = partial(from_hf, run.architecture)
    named, batches = dict(model.named_parameters()), _batches(run, grows=grows)
    optimizer = _their_optimizer(named)
    results: RankResults = {"losses": [], "norms": [], "gradients": []}
    results["validation"] = loss_of(model, next(batches)).item()
    for number in range(NUM_GROWING_STEPS if grows else NUM_STEPS):
        loss = loss_of(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        results["losses"].append(loss.item())
        results["norms"].append(torch.nn.utils.clip_grad_norm_(named.values(), 0.5).item())
        results["gradients"].append(as_ours({n: p.grad.clone() for n, p in named.items()}))
        for group in optimizer.param_groups:
            group["lr"] = rates(number)["learning_rate"]
        optimizer.step()
    results["weights"] = as_ours({name: p.detach() for name, p in named.items()})
    return results


def their_model(checkpoint: Path) -> Any:
    """Transformers' model with the weights of a checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    architecture, weights, _ = read_weights(checkpoint)
    if architecture.family == "gpt":
        model: Any = reference(architecture)
    else:
        values = architecture.model_dump(
            include={*LlamaConfig().to_dict()} & {*type(architecture).model_fields} - {"rope_theta"}
        )
        rope = {"rope_type": "default", "rope_theta": architecture.rope_theta}
        model = LlamaForCausalLM(LlamaConfig(**values, rope_parameters=rope))
    theirs = to_hf(architecture, weights)
    model.load_state_dict(theirs, strict=not architecture.tie_word_embeddings)
    return model


def _their_optimizer(named: dict[str, Any]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


def _batches(run: Run, *, grows: bool) -> Iterator[torch.Tensor]:
    """Tokens of each global batch."""
    samples = DocumentSamples(run.index, split="train", data_root=run.data_root)
    begin = 0
    while True:
        size = 4 if grows and begin < 20 else 8
        yield torch.from_numpy(np.stack([samples[begin + row] for row in range(size)]))
        begin += size


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of transformers' model, by torch."""
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
