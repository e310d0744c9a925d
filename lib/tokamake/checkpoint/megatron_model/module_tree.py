"""Megatron's nested `module`: the tree of a stage's tensors, and where a file holds them.

A tree is a nested dict with `TensorSlice` as leaves. The checkpoint formats know which file holds
which stage; `tensor_parallel_slices` knows which chunks a tensor consists of.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    Stack,
    TensorParallelRank,
    TensorSlice,
)
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout, Target
from tokamake.checkpoint.tensors.extents import Extent, PlannedTensor
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.allowed_globals import StandIn
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError, divisor

ROOT = "language_model"
"""Name of the module that holds all other modules; DeepSpeed's pipelines lack it."""
ROW_PER_TOKEN = ("word_embeddings.weight", "output_layer.weight", "lm_head.weight")
"""Ends of the names of the embedding and the output layer, also in DeepSpeed's pipelines."""
_OLD_NAMES = (
    (r"\btransformer\.", "encoder."),
    (r"(layers\.\d+\.|^)attention\.", r"\1self_attention."),
)
"""Patterns of names in early Megatron versions, and the current names."""
_CORE_NAMES = (
    (r"^(decoder|encoder)\.", "language_model.encoder."),
    (r"^pooler\.", "language_model.pooler."),
    (r"^lm_head\.layer_norm\.", "lm_head.layernorm."),
    (r"^output_layer\.bias$", "lm_head.bias"),
    (r"^(embedding|output_layer|mtp)\.", r"language_model.\1."),
    (r"\bmtp_model_layer\.", "transformer_layer."),
    # Transformer Engine fuses a norm into the projection that follows it.
    (r"\bself_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"\blinear_(q|kv)_up_proj\.layer_norm_", r"\1_layernorm."),
    (r"\bself_attention\.linear_qkv\.", "self_attention.query_key_value."),
    (r"\bself_attention\.linear_proj\.", "self_attention.dense."),
    (r"\bmlp\.linear_fc1\.layer_norm_", "post_attention_layernorm."),
    (r"\bpre_mlp_layernorm\.", "post_attention_layernorm."),
    (r"\bmlp\.linear_fc1\.", "mlp.dense_h_to_4h."),
    (r"\bmlp\.linear_fc2\.", "mlp.dense_4h_to_h."),
    # Transformer Engine's layers for all experts of a rank number their weights.
    (r"\bexperts\.(linear_fc[12]\.)(weight|bias)(\d+)$", r"experts.local_experts.\3.\1\2"),
    # DeepSpeed's experts.
    (r"\bdeepspeed_moe\.gate\.wg\.", "router."),
    (r"\bdeepspeed_moe\.experts\.deepspeed_experts\.", "experts.local_experts."),
    (r"(local_experts\.\d+\.)dense_h_to_4h\.", r"\1linear_fc1."),
    (r"(local_experts\.\d+\.)dense_4h_to_h\.", r"\1linear_fc2."),
)
"""Patterns of names in megatron.core and DeepSpeed, and the classic names. The order matters."""
_CORE_DECODER_NAMES = (
    (r"^decoder\.", "language_model.decoder."),
    # megatron.core has these modules under two names.
    (r"^lm_head\.output_layer\.bias$", "output_layer.bias"),
    (r"^position_embeddings\.", "embedding.position_embeddings."),
    (r"\bpre_cross_attn_layernorm\.", "post_attention_layernorm."),
    (r"\bcross_attention\.linear_q\.", "inter_attention.query."),
    (r"\bcross_attention\.linear_kv\.", "inter_attention.key_value."),
    (r"\bcross_attention\.linear_proj\.", "inter_attention.dense."),
    (
        r"(decoder\.layers\.(?:\d+\.)?)(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)",
        r"\1post_inter_attention_layernorm.",
    ),
)
"""Further patterns of a model with an encoder and a decoder; they come first."""
_CORE_STACKS = ("encoder.", "decoder.")
_HEAD, _TIED_HEAD = "language_model.output_layer.weight", "word_embeddings_for_head.weight"
_LAYER = re.compile(r"\bencoder\.layers\.(\d+)\.")
_NO_WEIGHTS = re.compile(r"(.*\.)?(_extra_state\d*|inv_freq|rotary_(pos_)?emb.*)")
"""Names of buffers that a module holds besides its weights."""


def stage_tree(
    rank: TensorParallelRank, layers: range, *, is_first: bool = True, is_last: bool = True
) -> Any:
    """Return the tensors of a pipeline stage, nested as in Megatron; stages count from layer 0.

    The last stage has the last norm, the output layer and heads. A model of towers has a tree for
    each.
    """
    if towers := rank.towers():
        return {tower.tower: stage_tree(tower, layers) for tower in towers}
    encoder = _stack(rank, layers)
    model: dict[str, Any] = {"encoder": encoder}
    if is_first:
        model = {"embedding": _nested(rank.embedding()), **model}
    if is_last:
        encoder |= {f"final_layernorm.{name}": tensor for name, tensor in rank.norm().items()}
        if rank.architecture.has_decoder:
            numbers = range(rank.architecture.setting("num_decoder_layers"))
            model["decoder"] = _stack(rank, numbers, stack="decoder") | {
                f"final_layernorm.{name}": tensor for name, tensor in rank.norm("decoder").items()
            }
        if mtp := rank.mtp_layers():
            model["mtp"] = mtp
        if output := rank.output_layer():
            model["output_layer"] = output
    tree = {ROOT: model}
    for name, tensor in rank.heads().items() if is_last else ():
        # Within a head, Megatron's names are dotted.
        parent = model if name.startswith(f"{ROOT}.") else tree
        module, _, remainder = name.removeprefix(f"{ROOT}.").partition(".")
        parent.setdefault(module, {})[remainder] = tensor
    return _of_expert_rank(tree) if rank.experts.rank else tree


def _of_expert_rank(tree: Any) -> Any:
    """Mark what the first expert-parallel rank has, too: all tensors besides experts."""
    if not isinstance(tree, TensorSlice):
        return {name: _of_expert_rank(value) for name, value in tree.items()}
    return tree._replace(is_replica=tree.is_replica or not tree.of_stack)


def _stack(
    rank: TensorParallelRank, layers: range, *, stack: Stack = "encoder"
) -> dict[str, TensorSlice]:
    return {
        f"layers.{index}.{name}": tensor
        for index, layer in enumerate(layers)
        for name, tensor in rank.layer(layer, stack).items()
    }


def rank_trees(
    rank: TensorParallelRank, layout: ParallelLayout, *, pipeline_rank: int, layers: Sequence[range]
) -> Iterator[Any]:
    """Yield the tensors of each (virtual) stage of a pipeline rank, nested as in Megatron."""
    for number in range(layout.virtual_pipeline_size):
        # Pipeline rank p has the stages p, p + P, p + 2 P, ...
        stage = number * layout.pipeline_parallel_size + pipeline_rank
        is_last = stage == len(layers) - 1
        tree = stage_tree(rank, layers[stage], is_first=stage == 0, is_last=is_last)
        if rank.architecture.num_mtp_layers and is_last and stage > 0:
            # These layers look up the next tokens in a copy of the embedding.
            copy = {name: each._replace(is_replica=True) for name, each in rank.embedding().items()}
            tree[ROOT] = {"embedding": _nested(copy), **tree[ROOT]}
        if rank.architecture.tie_word_embeddings and is_last and stage > 0:
            # The last stage has a copy of the tied embedding as its output layer.
            embedding = rank.embedding()["word_embeddings.weight"]
            tree["word_embeddings_for_head"] = {"weight": embedding._replace(is_replica=True)}
        yield tree


def even_layers(architecture: Architecture, stages: int) -> list[range]:
    """Return the layers of each stage, equally many."""
    per_stage, remainder = divmod(architecture.num_hidden_layers, stages)
    if architecture.several_stacks and stages > 1:
        raise UserError(
            f"pipeline_parallel_size × virtual_pipeline_size: {stages}: stages of a model with "
            f"{architecture.several_stacks} are not supported; give 1"
        )
    if remainder:
        raise UserError(
            f"pipeline_parallel_size × virtual_pipeline_size: {stages}: does not divide "
            f"{architecture.num_hidden_layers} layers, as Megatron-LM needs; give "
            f"{divisor(architecture.num_hidden_layers)}"
        )
    return [range(stage * per_stage, (stage + 1) * per_stage) for stage in range(stages)]


def _nested(tensors: Mapping[str, TensorSlice]) -> dict[str, dict[str, TensorSlice]]:
    """Turn the name `a.b` into a key `b` of a dict `a`."""
    tree: dict[str, dict[str, TensorSlice]] = {}
    for name, tensor in tensors.items():
        module, _, remainder = name.partition(".")
        tree.setdefault(module, {})[remainder] = tensor
    return tree


def planned_tree(tree: Any, checkpoint: Checkpoint, *, target: Target) -> Any:
    """Return the tree with a `PlannedTensor` for each `TensorSlice`."""
    if not isinstance(tree, TensorSlice):
        return {
            name: planned_tree(value, checkpoint, target=target) for name, value in tree.items()
        }
    # A fused tensor may come from tensors of several dtypes.
    stored = (checkpoint.source.dtype(chunk.key) for chunk in tree.chunks)
    # Biases that balance experts stay fp32.
    given = target.dtype if tree.is_trained else None
    dtype = dtypes.OF_WEIGHTS[given] if given else dtypes.widest(stored)
    return PlannedTensor(tree.shape, dtype, tree.chunks, tree.is_replica)


def without_elements(tree: Any) -> Any:
    """Return a tree of `PlannedTensor` with 0 elements each: ZeRO 3 keeps weights elsewhere."""
    if not isinstance(tree, PlannedTensor):
        return {name: without_elements(value) for name, value in tree.items()}
    return PlannedTensor((0,), tree.dtype, ())


def locate(file: Path, module: Any, tree: Any) -> Iterator[Extent]:
    """Yield the extent of each tensor of a tree; only the dotted names in the module count."""
    expected = current_slices(tree)
    tensors = _by_current_name(module, expected)
    _check_names(file, tensors, expected=expected)
    for name, tensor in expected.items():
        extent = torch_archive.extent(file, name, tensors[name], tensor.chunks)
        model_tensors.check_weight(name, extent, shape=tensor.shape)
        yield replace(extent, is_replica=tensor.is_replica)


def _check_names(file: Path, tensors: Mapping[str, Any], *, expected: Mapping[str, Any]) -> None:
    if stand_ins := [name for name in expected if isinstance(tensors.get(name), StandIn)]:
        # For example, Transformer Engine's Float8Tensor.
        raise UserError(
            f"{file}: tensor {stand_ins[0]} is a {type(tensors[stand_ins[0]]).name}, not a plain "
            f"tensor; save weights in one of {', '.join(dtypes.OF_WEIGHTS)}"
        )
    weights = [
        name
        for name, value in tensors.items()
        if isinstance(value, PickledTensor) and not _NO_WEIGHTS.fullmatch(name)
    ]
    model_tensors.check_names(weights, expected, where=file)


def in_file_order(module: Any, tree: Any) -> dict[str, TensorSlice]:
    """Return the slices of a tree in the order of the file, the order of the model's parameters."""
    slices = current_slices(tree)
    return {name: slices[name] for name in _by_current_name(module, slices) if name in slices}


def current_slices(tree: Any) -> dict[str, TensorSlice]:
    """Return the slices of a tree by the names that files of all versions get."""
    return {current_name(name): each for name, each in named_slices(tree)}


def _by_current_name(module: Any, expected: Container[str] = ()) -> dict[str, Any]:
    leaves = dict(torch_archive.leaves(module))
    has_decoder = has_both_stacks(leaves)
    tensors = {current_name(name, has_decoder=has_decoder): value for name, value in leaves.items()}
    if _TIED_HEAD in expected and _HEAD not in expected and _HEAD in tensors:
        # In megatron.core, the last stage's copy of a tied embedding is called output_layer, and
        # it is the last parameter. `pop` keeps it last.
        tensors[_TIED_HEAD] = tensors.pop(_HEAD)
    return tensors


def layer_numbers(module: Any) -> set[int]:
    matches = (_LAYER.search(name) for name in _by_current_name(module))
    return {int(match[1]) for match in matches if match}


def is_buffer(name: str) -> bool:
    """Return whether a tensor is a buffer, not a weight."""
    return bool(_NO_WEIGHTS.fullmatch(name))


def is_core(module: Any) -> bool:
    """Return whether a module has the names of megatron.core."""
    return any(name.startswith(_CORE_STACKS) for name, _ in torch_archive.leaves(module))


def has_both_stacks(names: Iterable[str]) -> bool:
    """Return whether names of megatron.core are of a model with an encoder and a decoder."""
    stacks = {stack for name in names for stack in _CORE_STACKS if name.startswith(stack)}
    return len(stacks) == len(_CORE_STACKS)


def current_names(module: Any) -> frozenset[str]:
    """Return the names of the tensors in a module, as current versions have them."""
    return frozenset(_by_current_name(module))


def current_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a module by the names of current versions."""
    return {
        name: tuple(value.shape)
        for name, value in _by_current_name(module).items()
        if isinstance(value, PickledTensor)
    }


def vocabulary_rows(file: Path, module: Any) -> int:
    """Return the number of rows of the embedding in a rank's file."""
    for name, value in torch_archive.leaves(module):
        if name.endswith("word_embeddings.weight") and isinstance(value, PickledTensor):
            return value.shape[0]
    raise UserError(
        f"{file}: has no word_embeddings.weight; give a checkpoint of Megatron with its weights"
    )


def named_slices(tree: Any, prefix: str = "") -> Iterator[tuple[str, TensorSlice]]:
    """Yield the slices of a tree with their dotted names."""
    # `torch_archive.leaves` would descend into a TensorSlice, since it is a tuple.
    if isinstance(tree, TensorSlice):
        yield prefix.removesuffix("."), tree
        return
    for name, value in tree.items():
        yield from named_slices(value, f"{prefix}{name}.")


@lru_cache(maxsize=100_000)
def current_name(name: str, *, has_decoder: bool = False) -> str:
    """Translate a name of an early Megatron version, or of megatron.core with a decoder or not."""
    of_decoder = _CORE_DECODER_NAMES if has_decoder else ()
    for pattern, replacement in (*_OLD_NAMES, *of_decoder, *_CORE_NAMES):
        name = re.sub(pattern, replacement, name)
    return name
