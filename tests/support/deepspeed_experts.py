"""A tiny Mixtral of DeepSpeed's own MoE layers, with Megatron-DeepSpeed's names and arguments."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.deepspeed_engines import initialize, mpu_of, nested
from tests.support.deepspeed_files import partitioned_states
from tests.support.ranks import spawn
from tokamake.checkpoint.torch_files import torch_archive

HIDDEN, WIDTH, HEADS, GROUPS, HEAD_DIM, VOCAB, LAYERS, EXPERTS = 12, 7, 3, 1, 4, 26, 2, 4
STEPS = 2


@dataclass(frozen=True)
class ExpertCase:
    """Layout and settings of the run that writes a checkpoint."""

    data: int = 1
    expert: int = 1
    tensor: int = 1
    zero_stage: int = 1
    precision: str = "fp32"
    chosen: int = 2
    divided: bool = False
    """Whether tensor-parallel ranks divide experts."""
    strided: bool = False
    """Whether consecutive data-parallel ranks have the same experts."""

    @property
    def world_size(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        return (
            f"dp{self.data}-ep{self.expert}-tp{self.tensor}-zero{self.zero_stage}-{self.precision}"
            f"-top{self.chosen}{'-divided' * self.divided}{'-strided' * self.strided}"
        )


def arguments(case: ExpertCase, **changes: Any) -> argparse.Namespace:
    """Return the arguments that Megatron-DeepSpeed saves."""
    values = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": WIDTH * case.tensor,
        "num_attention_heads": HEADS * case.tensor,
        "num_key_value_heads": GROUPS * case.tensor,
        "kv_channels": HEAD_DIM,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "swiglu": True,
        "normalization": "rmsnorm",
        "layernorm_epsilon": 1e-5,
        "use_rotary_position_embeddings": True,
        "add_position_embedding": False,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "vocab_size": VOCAB,
        "num_experts": [EXPERTS],
        "topk": case.chosen,
        "expert_interval": 1,
        "mlp_type": "standard",
        "moe_expert_parallel_size": case.expert,
        "moe_token_dropping": False,
        "moe_top2_2nd_expert_sampling": False,
        "enable_expert_tensor_parallelism": case.divided,
        "tensor_model_parallel_size": case.tensor,
        "consumed_train_samples": STEPS,
    }
    return argparse.Namespace(**{**values, **changes})


class Mlp(nn.Module):
    """Megatron-DeepSpeed's ParallelMLP of an expert; it returns a bias of None, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(HIDDEN, 2 * width, bias=False)
        self.dense_4h_to_h = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        gate, up = self.dense_h_to_4h(states).chunk(2, dim=-1)
        return self.dense_4h_to_h(F.silu(gate) * up), None


def _weight(shape: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(0.1 * torch.randn(shape))
    return module


class Layer(nn.Module):
    """A layer whose MLP is DeepSpeed's. Its attention is not computed."""

    def __init__(self, case: ExpertCase) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.input_layernorm = _weight((HIDDEN,))
        self.self_attention = nn.Module()
        self.self_attention.query_key_value = _weight(((HEADS + 2 * GROUPS) * HEAD_DIM, HIDDEN))
        self.self_attention.dense = _weight((HIDDEN, HEADS * HEAD_DIM))
        self.post_attention_layernorm = _weight((HIDDEN,))
        self.mlp = MoE(
            HIDDEN,
            Mlp(WIDTH if case.divided else WIDTH * case.tensor),
            num_experts=EXPERTS,
            ep_size=case.expert,
            k=case.chosen,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
            enable_expert_tensor_parallelism=case.divided,
        )
        for expert in self.mlp.deepspeed_moe.experts.deepspeed_experts:
            for parameter in expert.parameters():
                parameter.data = 0.5 * torch.randn(parameter.shape)


class ExpertModel(nn.Module):
    """A stack of layers in which only the MLPs compute something."""

    def __init__(self, case: ExpertCase) -> None:
        super().__init__()
        model = self.language_model = nn.Module()
        model.embedding = nn.Module()
        model.embedding.word_embeddings = _weight((VOCAB // case.tensor, HIDDEN))
        model.encoder = nn.Module()
        model.encoder.layers = nn.ModuleList(Layer(case) for _ in range(LAYERS))
        model.encoder.final_layernorm = _weight((HIDDEN,))
        model.output_layer = _weight((VOCAB // case.tensor, HIDDEN))

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.language_model.encoder.layers:
            states = states + layer.mlp(states)[0]
        rest = [each for name, each in self.named_parameters() if "deepspeed_moe" not in name]
        return states.square().sum() + sum(each.sin().sum() for each in rest)


def write_experts(folder: Path, *cases: ExpertCase) -> None:
    """Train and save each case below a folder; all have the same world size.

    Beside a checkpoint, held.pt has what the ranks held: `weight`, `master` and moments by the
    names of parameters, with numbers of experts among all ranks, and `mlp`: random states, and
    what the first layer's experts make of them.
    """
    (size,) = {case.world_size for case in cases}
    results = spawn(_write_all, size, folder, cases, timeout=600)
    for number, case in enumerate(cases):
        torch.save([result[number] for result in results], folder / str(case) / "held.pt")


def _write_all(folder: Path, cases: tuple[ExpertCase, ...]) -> list[dict[str, Any]]:
    initialize()
    return [_write(folder / str(case), case) for case in cases]


def load_experts(folders: Sequence[Path], cases: Sequence[ExpertCase]) -> list[dict[str, Any]]:
    """Let DeepSpeed load checkpoints, whose layouts the cases are; what this rank holds then."""
    initialize()
    results = []
    for folder, case in zip(folders, cases, strict=True):
        model, engine = _built(case)
        load = model.load_state_dict

        def load_nested(state: dict[str, Any], load: Any = load, **options: Any) -> Any:
            return load(dict(torch_archive.leaves(state)), **options)

        model.load_state_dict = load_nested
        engine.load_checkpoint(
            str(folder), load_optimizer_states=False, load_lr_scheduler_states=False
        )
        held = {
            _global_name(name, case): {"weight": parameter.detach().clone()}
            for name, parameter in model.named_parameters()
        }
        results.append({"parameters": held})
    return results


def _built(case: ExpertCase) -> tuple[Any, Any]:
    """A model of random weights and its engine."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.utils import groups

    groups.mpu = None
    for name in vars(groups):
        if name.startswith("_EXPERT_") and isinstance(getattr(groups, name), dict):
            getattr(groups, name).clear()
    torch.manual_seed(dist.get_rank() // case.tensor % case.expert)
    model = ExpertModel(case)
    shared = [p for name, p in model.named_parameters() if ".experts." not in name]
    for parameter in shared:  # experts differ among ranks, other parameters do not
        dist.broadcast(parameter.data, src=0)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    each = [
        {"name": "decay", "params": matrices},
        {"name": "other", "params": vectors, "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": case.zero_stage},
        "use_data_before_expert_parallelism": case.strided,
    }
    if case.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    parameters = split_params_into_different_moe_groups_for_optimizer(each)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW([g for g in parameters if g["params"]], lr=0.01),
        mpu=mpu_of(case) if case.tensor > 1 else None,
        config=settings,
    )
    return model, engine


def _write(folder: Path, case: ExpertCase) -> dict[str, Any]:
    model, engine = _built(case)
    dtype = next(model.parameters()).dtype
    for step in range(STEPS if case.tensor == 1 else 0):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        states = torch.randn(1, 24, HIDDEN, generator=generator).to(dtype)
        engine.backward(engine(states))
        engine.step()
    has_states = case.zero_stage and case.tensor == 1
    held = {
        _global_name(name, case): {
            "weight": parameter.detach().clone(),
            **dict(_states(engine.optimizer, parameter) if has_states else ()),
        }
        for name, parameter in model.named_parameters()
    }
    state_dict = model.state_dict
    model.state_dict = lambda *_, **options: nested(state_dict(**options))  # type: ignore[method-assign]
    client = {"args": arguments(case), "checkpoint_version": 3.0, "iteration": STEPS}
    engine.save_checkpoint(str(folder), client_state=client)
    model.state_dict = state_dict  # type: ignore[method-assign]
    result: dict[str, Any] = {"parameters": held}
    if case.tensor == 1:
        states = torch.randn(1, 24, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)
        with torch.no_grad():
            mlp = model.language_model.encoder.layers[0].mlp.eval()
            result["mlp"] = (states, mlp(states)[0])
    return result


def _states(optimizer: Any, parameter: Tensor) -> Any:
    for kind, tensor in partitioned_states(optimizer, optimizer.optimizer, parameter):
        yield kind, tensor.detach().clone()


def _global_name(name: str, case: ExpertCase) -> str:
    """Return the name of a parameter with the number of its expert among all ranks."""
    own, rank = EXPERTS // case.expert, dist.get_rank()
    place = rank // (case.world_size // case.expert) if case.strided else rank % case.expert
    return re.sub(r"(deepspeed_experts\.)(\d+)", lambda m: f"{m[1]}{place * own + int(m[2])}", name)
