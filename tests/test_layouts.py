"""Every layout trains as one process does: losses, norms, gradients, weights, against transformers.

What is proved here is told in docs/parallelism.md, which `test_the_table_is_true` holds to this.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_table import COMMAND, DOCUMENT, all_proved, document
from layouts import NUM_STEPS, Found, Layout, parallel, rates, train_all, whole
from ranks import spawn
from runs import ARCHITECTURE, make_run, prepare

from tokamake.checkpoint import latest, megatron_deepspeed, tensors
from tokamake.config import read_run
from tokamake.data.samples.loader import Samples

Changes = dict[str, Any]

# An odd vocabulary, so that its parts are uneven; more ranks than key-value heads at tp4.
SHAPE = {"num_hidden_layers": 4, "vocab_size": 121}
STARTS = {"untied": {}, "tied": {"tie_word_embeddings": True}, "mqa": {"num_key_value_heads": 1}}

SCHEDULES: dict[str, Changes] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved_1f1b": {"schedule": "interleaved_1f1b", "vpp": 2},
    "interleaved_zero_bubble": {"schedule": "interleaved_zero_bubble", "vpp": 2},
    "zbv": {"schedule": "zbv", "vpp": 2},
}


def with_schedules(**sizes: Any) -> list[Changes]:
    return [parallel(**sizes, **options) for options in SCHEDULES.values()]


PROVED: dict[int, list[tuple[str, Changes]]] = {
    1: [
        ("untied", {}),
        ("tied", {}),
        ("untied", {"micro_batch_size": 1}),
        ("untied", {"micro_batch_size": 8}),
        ("untied", {"recompute_granularity": "selective"}),
        ("untied", {"recompute_granularity": "full"}),
        ("untied", {"recompute_granularity": "full", "recompute_num_layers": 2}),
        ("untied", {"recompute_granularity": "full", "recompute_method": "block"}),
        ("untied", {"rampup_batch_size": (4, 4, 20)}),
    ],
    2: [
        *[("untied", {"zero_stage": stage}) for stage in range(4)],
        ("tied", {"zero_stage": 3}),
        ("untied", {"zero_stage": 2, "recompute_granularity": "full"}),
        ("untied", {"zero_stage": 1, "rampup_batch_size": (4, 4, 20)}),
        ("untied", parallel(tp=2)),
        ("tied", parallel(tp=2)),
        ("mqa", parallel(tp=2)),
        ("untied", parallel(tp=2, sp=True)),
        ("tied", parallel(tp=2, sp=True)),
        ("mqa", parallel(tp=2, sp=True)),
        ("untied", parallel(tp=2, sp=True) | {"recompute_granularity": "selective"}),
        ("untied", parallel(cp=2)),
        ("untied", parallel(cp=2, method="ulysses")),
        ("tied", parallel(cp=2) | {"recompute_granularity": "full"}),
        *[("untied", changes) for changes in with_schedules(pp=2)],
        *[("tied", changes) for changes in with_schedules(pp=2)],
        ("untied", parallel(pp=2, layers=(1, 3))),
        ("untied", parallel(pp=2) | {"recompute_granularity": "full"}),
        ("untied", parallel(pp=2) | {"rampup_batch_size": (4, 4, 20)}),
    ],
    4: [
        *[("untied", {"zero_stage": stage, "micro_batch_size": 1}) for stage in (0, 3)],
        ("untied", parallel(replicas=2) | {"zero_stage": 3}),
        ("untied", parallel(tp=4)),
        ("tied", parallel(tp=4, sp=True)),
        *[("untied", parallel(tp=2) | {"zero_stage": stage}) for stage in (0, 2)],
        ("tied", parallel(tp=2, sp=True) | {"zero_stage": 3}),
        ("untied", parallel(cp=4)),
        ("untied", parallel(cp=2) | {"zero_stage": 3}),
        ("untied", parallel(tp=2, cp=2, method="ulysses")),
        *[("untied", changes) for changes in with_schedules(pp=2)],
        ("untied", parallel(pp=2) | {"zero_stage": 3}),
        ("untied", parallel(pp=2, schedule="interleaved_1f1b", vpp=2) | {"zero_stage": 3}),
        ("tied", parallel(pp=2, cp=2)),
        ("tied", parallel(pp=4)),
    ],
    8: [
        *[("untied", changes) for changes in with_schedules(pp=2, tp=2, sp=True)],
        ("tied", parallel(pp=2, tp=2, schedule="zbv", vpp=2)),
        ("untied", parallel(tp=2, cp=2, sp=True) | {"zero_stage": 3}),
        ("untied", parallel(pp=2, cp=2, tp=2, sp=True)),
        ("untied", parallel(tp=2, replicas=2) | {"zero_stage": 3}),
        ("untied", parallel(tp=2, cp=2, replicas=2, method="ulysses") | {"zero_stage": 2}),
    ],
}
"""Layouts by number of ranks: which start, and which settings."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run.yaml for each start."""
    found = {}
    for name, changes in STARTS.items():
        root = prepare(tmp_path_factory.mktemp(name), train_samples=200)
        architecture = ARCHITECTURE.model_copy(update=SHAPE | changes)
        (root / "start").rename(root / "other")
        weights = tensors.random(architecture, 5)
        megatron_deepspeed.write(root / "start", architecture, weights)
        found[name] = make_run(root, "run", train_steps=24, backend="native")
    return found


@pytest.fixture(scope="module")
def expected(runs: dict[str, Path]) -> dict[tuple[str, bool], Found]:
    """What transformers and torch make of each start, with full batches and with growing ones."""
    return {
        (name, grows): plain_training(config, grows=grows)
        for name, config in runs.items()
        for grows in (False, True)
        if not grows or name == "untied"
    }


def plain_training(config: Path, *, grows: bool) -> Found:
    """Train transformers' Llama with torch's AdamW in one process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    run = read_run(config)
    architecture, weights, _ = latest.read(run.checkpoint)
    values = architecture.model_dump(
        include={*LlamaConfig().to_dict()} & {*type(architecture).model_fields} - {"rope_theta"}
    )
    rope = {"rope_type": "default", "rope_theta": architecture.rope_theta}
    model = LlamaForCausalLM(LlamaConfig(**values, rope_parameters=rope))
    model.load_state_dict(weights, strict=not architecture.tie_word_embeddings)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    samples = Samples(run.index, split="train", data_root=run.data_root)
    found: Found = {"losses": [], "norms": [], "shapes": {n: p.shape for n, p in named.items()}}
    begin = 0
    for number in range(-1, NUM_STEPS):
        size = 4 if grows and begin < 20 else 8
        rows = np.stack([samples[begin + row] for row in range(size)])
        begin += size
        tokens = torch.from_numpy(rows)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if number < 0:
            found["validation"] = loss.item()
            continue
        optimizer.zero_grad()
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(torch.nn.utils.clip_grad_norm_(named.values(), 0.5).item())
        if number == 0:
            found["gradients"] = {n: p.grad.clone() for n, p in named.items()}
        for group in optimizer.param_groups:
            group["lr"] = rates(number)["learning_rate"]
        optimizer.step()
    found["weights"] = {name: p.detach() for name, p in named.items()}
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", PROVED)
def test_layouts_equal_one_process(
    world_size: int, runs: dict[str, Path], expected: dict[tuple[str, bool], Found]
) -> None:
    layouts = [Layout(runs[start], changes) for start, changes in PROVED[world_size]]
    of_ranks = spawn(train_all, world_size, layouts, timeout=900)
    problems = []
    for number, (start, changes) in enumerate(PROVED[world_size]):
        founds = [found[number] for found in of_ranks]
        theirs = expected[start, "rampup_batch_size" in changes]
        problem = difference(founds, theirs)
        if problem:
            problems.append(f"{start} {changes}: {problem}")
    assert not problems, "\n".join(problems)


def difference(founds: list[Found], theirs: Found) -> str:
    """What differs between the ranks' training and the expected; empty: nothing does."""
    for key in ("losses", "norms", "validation"):
        for found in founds:
            if not np.allclose(found[key], theirs[key], rtol=1e-5, atol=0):
                return f"{key} {found[key]}, expected {theirs[key]}"
    for key, atol in (("gradients", 1e-5), ("weights", 1e-4)):
        try:
            ours = whole(founds, key, theirs["shapes"])
        except AssertionError as error:
            return f"{key}: {error}"
        for name, tensor in theirs[key].items():
            largest = (ours[name] - tensor).abs().max() / tensor.abs().max()
            if not largest <= atol:
                return f"{key}: {name} differs by {largest:.1e} of its largest"
    return ""


def test_the_table_is_true() -> None:
    made = document(all_proved())
    assert made == DOCUMENT.read_text(encoding="utf-8"), f"rewrite it: {COMMAND}"
