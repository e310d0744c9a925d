"""Keys of extra states in Megatron-LM's distributed checkpoints.

A module of Transformer Engine has one. Megatron always loads it; weights in 8 bit use it.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from tokamake.checkpoint.megatron_model.core_names import layers_differ, stack_of
from tokamake.checkpoint.torch_dist.sharded_tensors import ShardedTensor
from tokamake.config.architecture import Architecture

_EXTRA_STATE = "_extra_state"
_LAYER_MODULES = (
    *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm"),
    *("self_attention.linear_q_proj", "self_attention.linear_q_down_proj"),
    *("self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj"),
    *("self_attention.linear_kv_up_proj", "input_layernorm", "pre_mlp_layernorm"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
    *("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
"""Modules of a layer that have such a state in one of Transformer Engine's versions. All families
get the same keys: Megatron ignores keys that it does not ask for."""
_CROSS_ATTENTION = (
    *("pre_cross_attn_layernorm", "cross_attention.core_attention"),
    *("cross_attention.linear_q", "cross_attention.linear_kv", "cross_attention.linear_proj"),
)
"""Further modules with such a state in a layer of a decoder that attends to an encoder."""


def keys_of(architecture: Architecture, model: Iterable[ShardedTensor]) -> Iterator[str]:
    """Yield the keys of the extra states that Megatron asks for when it loads a model."""
    if layers_differ(architecture):
        yield from _of_single_layers(model)
        return
    yield from _of_single_layers(each for each in model if each.key.startswith("mtp."))
    stacks = {stack_of(architecture): architecture.num_hidden_layers}
    further = {}
    if architecture.has_decoder:
        stacks["decoder"] = architecture.setting("num_decoder_layers")
        further["decoder"] = _CROSS_ATTENTION
        for module in ("output_layer", "lm_head.output_layer"):
            yield f"{module}.{_EXTRA_STATE}/shard_0_1"
    for stack, layers in stacks.items():
        for module in (*_LAYER_MODULES, *further.get(stack, ())):
            for number in range(layers):
                yield f"{stack}.layers.{module}.{_EXTRA_STATE}/shard_{number}_{layers}"
        yield f"{stack}.final_layernorm.{_EXTRA_STATE}/shard_0_1"
    for sharded in model:
        if len(sharded.stack) > 1:  # of modules within a layer, such as experts
            yield from _of_module(sharded)


def _of_module(sharded: ShardedTensor) -> Iterator[str]:
    module, size = sharded.key.rpartition(".")[0], ".".join(map(str, sharded.stack or (1,)))
    for numbers in product(*map(range, sharded.stack or (1,))):
        place = ".".join(map(str, numbers))
        yield f"{module}.{_EXTRA_STATE}/shard_{place}_{size}"


def _of_single_layers(model: Iterable[ShardedTensor]) -> Iterator[str]:
    """Keys of the extra states of modules, of layers that are stored for themselves."""
    for sharded in model:
        yield from _of_module(sharded)
        module = sharded.key.rpartition(".")[0]
        if module.endswith(".linear_proj"):
            yield f"{module.removesuffix('.linear_proj')}.core_attention.{_EXTRA_STATE}/shard_0_1"
