"""States of weights and optimizers that the ranks of DeepSpeed hold."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.deepspeed_models import Weight

KINDS = ("exp_avg", "exp_avg_sq")


def weights_in(module: nn.Module) -> Iterator[Weight]:
    return (child for child in module.modules() if isinstance(child, Weight))


def rank_states(engine: Any, module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the states of each weight on this rank, gathered from its data-parallel peers."""
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    # With master weights but without ZeRO, DeepSpeed takes a step with zero gradients first.
    (step,) = {int(state["step"]) for state in base.state.values()}
    for weight in weights_in(module):
        parameter = weight.weight
        states = {
            kind: value.detach().clone() for kind, value in _states(optimizer, base, parameter)
        }
        yield weight.name, {**states, "weight": gathered(parameter), "step": step}


def gathered(parameter: Tensor) -> Tensor:
    """Return the whole weight, also with ZeRO 3."""
    from deepspeed import zero

    with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def _states(optimizer: Any, base: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the master weights and the moments of a parameter."""
    from deepspeed import utils

    if hasattr(parameter, "ds_id"):
        yield "master", utils.safe_get_full_fp32_param(parameter)
        for kind in KINDS:
            yield kind, utils.safe_get_full_optimizer_state(parameter, kind)
        return
    if hasattr(parameter, "_hp_mapping"):
        yield from _partitioned_states(optimizer, base, parameter)
        return
    fp16, fp32 = (chain(*getattr(optimizer, f"fp{bits}_groups", [])) for bits in (16, 32))
    masters = dict(zip(fp16, fp32, strict=True))
    master = masters.get(parameter, parameter)  # an fp32 weight is its own master
    yield "master", master
    for kind in KINDS:
        yield kind, base.state[master][kind]


def _partitioned_states(
    optimizer: Any, base: Any, parameter: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the same for flat groups, by the address of the parameter in memory.

    DeepSpeed's own functions are wrong with round_robin_gradients, and find no states of a second
    group.
    """
    flats = getattr(optimizer, "bit16_groups_flat", None) or optimizer.bf16_groups_flat
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None)
    for flat, master, group in zip(
        flats,
        masters or optimizer.fp32_groups_flat_partition,
        optimizer.real_dp_process_group,
        strict=True,
    ):
        if flat.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            continue
        start = parameter.storage_offset()
        # Sorted, because the order of loaded states differs between ranks of DeepSpeed.
        for kind, partition in sorted({"master": master, **base.state[master]}.items()):
            if partition.shape == master.shape:
                parts = [torch.empty_like(partition) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, partition.detach(), group=group)
                whole = torch.cat(parts)[start : start + parameter.numel()]
                yield kind, whole.view(parameter.shape)


def merge_ranks(
    tensor_size: int, states: list[dict[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Return whole tensors from the states of all ranks. Ranks of a tensor are consecutive."""
    merged: dict[str, dict[str, Any]] = {}
    for start in range(0, len(states), tensor_size):
        peers = states[start : start + tensor_size]
        for name in peers[0]:
            kinds = ("weight", "master", *KINDS)
            values = {
                kind: _whole(name, [peer[name][kind] for peer in peers])
                for kind in kinds
                if kind in peers[0][name]
            }
            exact = values.get("master", values["weight"])
            assert torch.equal(exact.to(values["weight"].dtype), values["weight"]), name
            # Other data-parallel ranks, and stages with a tied embedding, hold replicas.
            first = merged.setdefault(name, {**values, "step": peers[0][name].get("step")})
            assert all(torch.equal(first[kind], value) for kind, value in values.items()), name
    return merged


def _whole(name: str, parts: list[Tensor]) -> Tensor:
    """Return the whole tensor from the slices of tensor-parallel ranks."""
    if name.endswith(("norm", "layernorm")):
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if name.endswith("dense_h_to_4h"):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[number] for number in range(2) for half in halves])
    return torch.cat(parts, dim=1 if name.endswith(("dense", "dense_4h_to_h")) else 0)
