"""Classic checkpoints of Megatron-LM with the optimizers of megatron.core: an oracle.

The optimizer takes one step with the fp32 weights as gradients and a learning rate of 0. With these
betas, each first moment is half the weight, and each second moment a quarter of its square. Thus
mixed-up parameters, rows or halves give other numbers.
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
from tokamake.checkpoint.tensors.chunks import check_replicas
from tokamake.checkpoint.tensors.source import TensorSource
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
"""Padding rows of the embedding. All of them are on the last rank."""
SCALE = 1024.0
"""Loss scale in fp16."""
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
"""Parts of parameter names, in the order in which Megatron-LM constructs the modules."""
EMBEDDINGS = ("word_embeddings.weight", "output_layer.weight", "word_embeddings_for_head.weight")


def on_cpu() -> Any:
    """Return megatron.core's optimizers and scalers for the CPU.

    The modules refer to CUDA devices and tensor types. Replace these in the source.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        from megatron.core.optimizer import grad_scaler, optimizer
    patched = types.ModuleType("megatron.core.optimizer.on_cpu")
    vars(patched).update(__package__="megatron.core.optimizer", __file__=optimizer.__file__)
    for module in (grad_scaler, optimizer):
        source = inspect.getsource(module).replace("'torch.cuda.", "'torch.")
        source = source.replace(".cuda(torch.cuda.current_device())", "").replace("'cuda'", "'cpu'")
        exec(compile(source, str(module.__file__), "exec"), vars(patched))
    return patched


def random(architecture: Architecture) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"model.{name}": torch.randn(tuple(shape), generator=generator)
        for name, shape in model_tensors.shapes(architecture).items()
    }


def in_memory(architecture: Architecture, tensors: dict[str, Tensor], **notes: Any) -> Checkpoint:
    source = TensorSource([], {}, in_memory=tensors)
    return Checkpoint("native", Path(), architecture, source, progress=PROGRESS, notes=notes)


def named_parameters(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the parameters of all stages in a file, in the order of Megatron's optimizer."""
    parameters = []
    for model in sorted(name for name in state if re.fullmatch(r"model\d*", name)):
        tensors = dict(torch_archive.leaves(state[model]))
        assert [*tensors] == sorted(tensors, key=position)
        parameters += [*tensors.items()]
    return parameters


def position(name: str) -> tuple[int, int, int, bool]:
    """Return the sort key of a parameter: embedding, layers, last norm and output layer."""
    module = next(n for n, part in enumerate(ORDER) if part in name)
    layer = re.search(r"layers\.(\d+)", name)
    section = 0 if name.startswith("language_model.embedding") else 1 if layer else 2
    return section, int(layer[1]) if layer else 0, module, name.endswith("bias")


def decays_first(name: str, shape: Any) -> int:
    return int(len(shape) < 2)


def decays_last(name: str, shape: Any) -> int:
    return int(len(shape) > 1)


def separate_embeddings(name: str, shape: Any) -> int:
    return 1 if len(shape) < 2 else 2 if name.endswith(EMBEDDINGS) else 0


Grouping = Callable[[str, Any], int]


def optimizer_of(
    megatron: Any, state: dict[str, Any], grouping: Grouping = decays_first
) -> tuple[Any, list[torch.nn.Parameter]]:
    """Return Megatron's optimizer for the model in a file, before any step, and its parameters."""
    from megatron.core.optimizer import OptimizerConfig

    groups: dict[int, list[torch.nn.Parameter]] = {}
    for name, tensor in named_parameters(state):
        parameter = torch.nn.Parameter(tensor.detach().clone())
        groups.setdefault(grouping(name, tensor.shape), []).append(parameter)
    flat = [parameter for _, group in sorted(groups.items()) for parameter in group]
    multiples = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    param_groups = [
        {"params": group, "wd_mult": float(group[0].dim() > 1), **multiples}
        for _, group in sorted(groups.items())
    ]
    for number, group in enumerate(param_groups):
        group["is_decoupled_lr"] = number == 2
        group["weight_decay"] = 0.1 * group["wd_mult"]
    base = torch.optim.AdamW(param_groups, lr=LR, betas=BETAS, eps=1e-8)
    dtype = flat[0].dtype
    if dtype == torch.float32:
        return megatron.FP32Optimizer(base, OptimizerConfig(), None), flat
    scaler = None
    if dtype == torch.float16:
        scaler = megatron.DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 10, 2)
    config = OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16)
    return megatron.Float16OptimizerWithFloat16Params(base, config, scaler, None), flat


def as_apex(state: dict[str, Any]) -> None:
    """Move the step counts into the groups, where the Adam of Apex keeps them."""
    for parameter in state["state"].values():
        assert parameter.pop("step") == STEP
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
    """Write a checkpoint of tokamake's weights and Megatron's optimizer after one step."""
    weights = random(architecture)
    for name in {dtype, "fp32"}:
        target = Target(layout, name)
        writer.write(folder / name, in_memory(architecture, weights), "megatron", target)
    for file in (folder / dtype).rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        optimizer, _ = optimizer_of(megatron, state, grouping)
        fp32 = torch.load(folder / "fp32" / file.relative_to(folder / dtype), weights_only=False)
        groups: dict[int, list[Tensor]] = {}
        for name, tensor in named_parameters(fp32):
            groups.setdefault(grouping(name, tensor.shape), []).append(tensor)
        masters = [tensor for _, group in sorted(groups.items()) for tensor in group]
        parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        for parameter, tensor in zip(parameters, masters, strict=True):
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


def assert_trained(checkpoint: Checkpoint, architecture: Architecture) -> None:
    """Check every bit of a checkpoint after the step, with weights in any dtype."""
    source = checkpoint.source
    check_replicas(source)
    for name, exact in random(architecture).items():
        name = name.removeprefix("model.")
        weights = source.read(f"model.{name}")
        assert torch.equal(weights, exact.to(weights.dtype)), name
        if weights.dtype != torch.float32:
            assert torch.equal(source.read(f"master.{name}"), exact), name
        assert torch.equal(source.read(f"optimizer.exp_avg.{name}"), exact / 2), name
        second = source.read(f"optimizer.exp_avg_sq.{name}")
        assert torch.equal(second, exact * exact / 4), name
        assert source.number(f"optimizer.step.{name}") == STEP
    # Weights, two moments, a step count, and master weights if the weights are rounded.
    tensors_per_parameter = 4 + (weights.dtype != torch.float32)
    assert len([*source]) == tensors_per_parameter * len(random(architecture))
    assert checkpoint.unread == ()
    assert checkpoint.progress == PROGRESS
    assert checkpoint.notes[OPTIMIZER_SETTINGS] == {
        "lr": LR,
        "betas": [*BETAS],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


def assert_loads(megatron: Any, file: Path, expected: dict[str, Any]) -> None:
    """Check that Megatron's optimizer loads a file, and has the expected states, except padding."""
    state = torch.load(file, weights_only=False)
    optimizer, _ = optimizer_of(megatron, state)
    optimizer.load_state_dict(state["optimizer"])
    loaded = dict(torch_archive.leaves(optimizer.state_dict()))
    for name, value in torch_archive.leaves(expected["optimizer"]):
        if not isinstance(value, Tensor):
            assert loaded[name] == value, name
            continue
        rows = len(value) - PADDING if value.shape[:1] in ((256,), (128,)) else None
        assert torch.equal(
            loaded[name][:rows] if rows else loaded[name], value[:rows] if rows else value
        ), name
