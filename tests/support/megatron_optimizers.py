"""Checkpoints in Megatron-LM's classic format whose optimizer is megatron.core's own: an oracle.

Gradients of its one step are the fp32 weights and its learning rate is 0, so that with these betas
each first moment is half the weight, and each second a quarter of its square: whoever mixes up
parameters, rows or halves gets other numbers.
"""

import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokamake.checkpoint import model_tensors, writer
from tokamake.checkpoint.tensors.checkpoint import (
    OPTIMIZER_SETTINGS,
    Checkpoint,
    ParallelLayout,
    Progress,
    Target,
)
from tokamake.checkpoint.tensors.extents import TensorSource
from tokamake.checkpoint.tensors.replicas import check_copies
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.config.architecture import Architecture

SHAPE: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}
FAMILIES = {
    "llama": Architecture(**SHAPE),
    "llama-tied": Architecture(**{**SHAPE, "tie_word_embeddings": True}),
    "gpt2": Architecture(**{**SHAPE, "num_key_value_heads": 4}, family="gpt"),
    "gptbigcode": Architecture(**{**SHAPE, "num_key_value_heads": 1}, family="gpt"),
}
STEP, LR = 1.0, 0.0
BETAS = (0.5, 0.75)
PADDING = 6
"""Rows of the embedding, all of them on the last rank."""
SCALE = 1024.0
"""Of the loss in fp16."""
PROGRESS = Progress(1, 8, 64)
SCHEDULER = {
    "max_lr": 1e-3,
    "lr_warmup_steps": 0,
    "num_steps": 8,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 100,
    "min_lr": 0.0,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 100,
}
ORDER = (
    "embedding.word_embeddings.weight",
    "embedding.word_embeddings.norm",
    "embedding.position_embeddings",
    *("input_layernorm", "query_key_value", "attention.query.", "attention.key_value.", "dense."),
    *("post_attention_layernorm", "dense_h_to_4h", "dense_4h_to_h", "final_layernorm"),
    *("output_layer", "word_embeddings_for_head"),
)
"""Of a model in Megatron-LM, as its constructors make it; layers are in the order of numbers."""
WORDS = ("word_embeddings.weight", "output_layer.weight", "word_embeddings_for_head.weight")


def on_cpu() -> Any:
    """megatron.core's optimizers and scalers, which ask for a GPU in some constants."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        from megatron.core.optimizer import grad_scaler, optimizer
    made = types.ModuleType("megatron.core.optimizer.on_cpu")
    vars(made).update(__package__="megatron.core.optimizer", __file__=optimizer.__file__)
    for module in (grad_scaler, optimizer):
        text = inspect.getsource(module).replace("'torch.cuda.", "'torch.")
        text = text.replace(".cuda(torch.cuda.current_device())", "").replace("'cuda'", "'cpu'")
        exec(compile(text, str(module.__file__), "exec"), vars(made))
    return made


def random(architecture: Architecture) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"model.{name}": torch.randn(tuple(shape), generator=generator)
        for name, shape in model_tensors.shapes(architecture).items()
    }


def in_memory(architecture: Architecture, known: dict[str, Tensor], **notes: Any) -> Checkpoint:
    return Checkpoint(
        "native", Path(), architecture, TensorSource([], {}, known), progress=PROGRESS, notes=notes
    )


def named_parameters(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Of all stages of a file, in the order in which Megatron's optimizer gets them."""
    found = []
    for model in sorted(name for name in state if re.fullmatch(r"model\d*", name)):
        each = dict(torch_archive.leaves(state[model]))
        assert [*each] == sorted(each, key=place)
        found += [*each.items()]
    return found


def place(name: str) -> tuple[int, int, int, bool]:
    """Where a parameter comes in a model: layers are between embedding and last norm."""
    number = next(n for n, part in enumerate(ORDER) if part in name)
    layer = re.search(r"layers\.(\d+)", name)
    part = 0 if name.startswith("language_model.embedding") else 1 if layer else 2
    return part, int(layer[1]) if layer else 0, number, name.endswith("bias")


def decays_first(name: str, shape: Any) -> int:
    return int(len(shape) < 2)


def decays_last(name: str, shape: Any) -> int:
    return int(len(shape) > 1)


def words_apart(name: str, shape: Any) -> int:
    return 1 if len(shape) < 2 else 2 if name.endswith(WORDS) else 0


Grouping = Callable[[str, Any], int]


def optimizer_of(
    megatron: Any, state: dict[str, Any], grouping: Grouping = decays_first
) -> tuple[Any, list[torch.nn.Parameter]]:
    """Megatron's optimizer of a file's model, not stepped yet, and its parameters."""
    from megatron.core.optimizer import OptimizerConfig

    groups: dict[int, list[torch.nn.Parameter]] = {}
    for name, tensor in named_parameters(state):
        parameter = torch.nn.Parameter(tensor.detach().clone())
        groups.setdefault(grouping(name, tensor.shape), []).append(parameter)
    flat = [parameter for _, group in sorted(groups.items()) for parameter in group]
    multiples = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    described = [
        {"params": group, "wd_mult": float(group[0].dim() > 1), **multiples}
        for _, group in sorted(groups.items())
    ]
    for number, group in enumerate(described):
        group["is_decoupled_lr"] = number == 2
        group["weight_decay"] = 0.1 * group["wd_mult"]
    base = torch.optim.AdamW(described, lr=LR, betas=BETAS, eps=1e-8)
    kind = flat[0].dtype
    if kind == torch.float32:
        return megatron.FP32Optimizer(base, OptimizerConfig(), None), flat
    scaler = None
    if kind == torch.float16:
        scaler = megatron.DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 10, 2)
    config = OptimizerConfig(fp16=kind == torch.float16, bf16=kind == torch.bfloat16)
    return megatron.Float16OptimizerWithFloat16Params(base, config, scaler, None), flat


def as_apex(state: dict[str, Any]) -> None:
    """Steps in groups, as the Adam of Apex has them."""
    for each in state["state"].values():
        assert each.pop("step") == STEP
    for group in state["param_groups"]:
        group["step"] = int(STEP)


def trained(
    megatron: Any,
    folder: Path,
    architecture: Architecture,
    layout: ParallelLayout,
    dtype: str,
    *,
    grouping: Grouping = decays_first,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """A checkpoint whose weights have been written and whose optimizer is Megatron's."""
    exact = random(architecture)
    for kind in {dtype, "fp32"}:
        target = Target(layout, kind)
        writer.write(folder / kind, in_memory(architecture, exact), "megatron", target)
    for file in (folder / dtype).rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        optimizer, _ = optimizer_of(megatron, state, grouping)
        whole = torch.load(folder / "fp32" / file.relative_to(folder / dtype), weights_only=False)
        groups: dict[int, list[Tensor]] = {}
        for name, tensor in named_parameters(whole):
            groups.setdefault(grouping(name, tensor.shape), []).append(tensor)
        masters = [tensor for _, group in sorted(groups.items()) for tensor in group]
        own = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
        for parameter, tensor in zip(own, masters, strict=True):
            parameter.data.copy_(tensor)
            parameter.grad = tensor.clone()
        optimizer.optimizer.step()
        if dtype == "fp16":
            scale = {"scale": torch.tensor([SCALE]), "growth_tracker": 5, "hysteresis_tracker": 2}
            optimizer.grad_scaler.load_state_dict(scale)
        state["optimizer"] = optimizer.state_dict()
        if change:
            change(state["optimizer"] if dtype == "fp32" else state["optimizer"]["optimizer"])
        state["opt_param_scheduler"] = SCHEDULER
        torch.save(state, file)
    return folder / dtype


def assert_trained(found: Checkpoint, architecture: Architecture) -> None:
    """See that all is there bit by bit, whatever the weights' number format."""
    check_copies(found.source)
    for name, exact in random(architecture).items():
        name = name.removeprefix("model.")
        weights = found.source.read(f"model.{name}")
        assert torch.equal(weights, exact.to(weights.dtype)), name
        if weights.dtype != torch.float32:
            assert torch.equal(found.source.read(f"master.{name}"), exact), name
        assert torch.equal(found.source.read(f"optimizer.exp_avg.{name}"), exact / 2), name
        second = found.source.read(f"optimizer.exp_avg_sq.{name}")
        assert torch.equal(second, exact * exact / 4), name
        assert found.source.number(f"optimizer.step.{name}") == STEP
    kinds = {"model": 1, "optimizer": 3} | ({"master": 1} if weights.dtype != torch.float32 else {})
    count = len(random(architecture))
    assert len([*found.source]) == sum(kinds.values()) * count
    assert found.unread == ()
    assert found.progress == PROGRESS
    assert found.notes[OPTIMIZER_SETTINGS] == {
        "lr": LR,
        "betas": [*BETAS],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


def assert_loads(megatron: Any, file: Path, expected: dict[str, Any]) -> None:
    """See that Megatron's optimizer has what it saved itself at this layout, but for padding."""
    state = torch.load(file, weights_only=False)
    optimizer, _ = optimizer_of(megatron, state)
    optimizer.load_state_dict(state["optimizer"])
    found = dict(torch_archive.leaves(optimizer.state_dict()))
    for name, value in torch_archive.leaves(expected["optimizer"]):
        if not isinstance(value, Tensor):
            assert found[name] == value, name
            continue
        rows = len(value) - PADDING if value.shape[:1] in ((256,), (128,)) else None
        assert torch.equal(
            found[name][:rows] if rows else found[name], value[:rows] if rows else value
        ), name
