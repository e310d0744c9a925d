"""Megatron's `module`: how it nests a stage's tensors, and how those in a file are found again.

Formats of its kin say which file has which stage; `parts` what is in the tensors.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokamake.checkpoint.megatron_model.rank_tensors import Rank, TensorSlice
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.extents import Extent, PlannedTensor
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.allowed_globals import StandIn
from tokamake.checkpoint.torch_files.pickle_reader import Located
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

_OLDER = ((r"\btransformer\.", "encoder."), (r"(layers\.\d+\.|^)attention\.", r"\1self_attention."))
"""Names of earlier Megatrons, and what they became."""
_CORE = (
    (r"^decoder\.", "language_model.encoder."),
    (r"^(embedding|output_layer)\.", r"language_model.\1."),
    (r"\bself_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"\bself_attention\.linear_qkv\.", "self_attention.query_key_value."),
    (r"\bself_attention\.linear_proj\.", "self_attention.dense."),
    (r"\bmlp\.linear_fc1\.layer_norm_", "post_attention_layernorm."),
    (r"\bpre_mlp_layernorm\.", "post_attention_layernorm."),
    (r"\bmlp\.linear_fc1\.", "mlp.dense_h_to_4h."),
    (r"\bmlp\.linear_fc2\.", "mlp.dense_4h_to_h."),
)
"""Names of megatron.core, whose norms are in the next projection where that is Transformer
Engine's, and what they are called here."""
_HEAD, _TIED_HEAD = "language_model.output_layer.weight", "word_embeddings_for_head.weight"
_LAYER = re.compile(r"\bencoder\.layers\.(\d+)\.")
_NO_WEIGHTS = re.compile(r"(.*\.)?(_extra_state|inv_freq|rotary_(pos_)?emb.*)")
"""Names of what a module holds beside weights."""


def nested(rank: Rank, layers: range, *, is_first: bool = True, is_last: bool = True) -> Any:
    """A stage's tensors as Megatron nests them.

    Args:
        rank: what each tensor-parallel rank has.
        layers: of the stage; they are counted from 0 in each.
        is_first: whether it has the embedding.
        is_last: whether it has the last norm and the output layer.
    """
    encoder = {
        f"layers.{number}.{name}": part
        for number, layer in enumerate(layers)
        for name, part in rank.layer(layer).items()
    }
    model: dict[str, Any] = {"encoder": encoder}
    if is_first:
        model = {"embedding": _grouped(rank.embedding()), **model}
    if is_last:
        encoder |= {f"final_layernorm.{name}": part for name, part in rank.norm().items()}
        if output := rank.output_layer():
            model["output_layer"] = output
    return {"language_model": model}


def _grouped(parts: Mapping[str, TensorSlice]) -> dict[str, dict[str, TensorSlice]]:
    """`a.b` as `b` in `a`."""
    found: dict[str, dict[str, TensorSlice]] = {}
    for name, part in parts.items():
        group, _, rest = name.partition(".")
        found.setdefault(group, {})[rest] = part
    return found


def planned(tree: Any, checkpoint: Checkpoint, target: Target) -> Any:
    """The same tree with what files shall hold in the place of parts."""
    if not isinstance(tree, TensorSlice):
        return {name: planned(value, checkpoint, target) for name, value in tree.items()}
    # Of what several tensors make up, one that holds them all.
    kept = (checkpoint.source.dtype(block.key) for block in tree.blocks)
    dtype = dtypes.OF_WEIGHTS[target.dtype] if target.dtype else dtypes.widest(kept)
    return PlannedTensor(tree.shape, dtype, tree.blocks, tree.is_copy)


def emptied(tree: Any) -> Any:
    """What `planned` gives, without elements: weights that ZeRO 3 keeps in shards alone."""
    if not isinstance(tree, PlannedTensor):
        return {name: emptied(value) for name, value in tree.items()}
    return PlannedTensor((0,), tree.dtype, ())


def found(file: Path, module: Any, tree: Any) -> Iterator[Extent]:
    """Where the parts of a tree lie in a file.

    Args:
        file: of torch.save.
        module: what `torch_pickles.read` has found in it.
        tree: of `TensorSlice`, nested in any way; names with dots are what counts.

    Raises:
        UserError: a tensor is missing, unknown or has another shape.
    """
    wanted = dict(named(tree))
    tensors = _by_name(module, wanted)
    unknown = [
        name
        for name, value in tensors.items()
        if isinstance(value, Located) and name not in wanted and not _NO_WEIGHTS.fullmatch(name)
    ]
    missing = [name for name in wanted if not isinstance(tensors.get(name), Located)]
    if strange := [name for name in missing if isinstance(tensors.get(name), StandIn)]:
        raise UserError(
            f"{file}: tensor {strange[0]} is a {type(tensors[strange[0]]).name}, no plain tensor; "
            f"save weights in one of {', '.join(dtypes.OF_WEIGHTS)}"
        )
    for problem, names in (("is missing", missing), ("is not part of the model", unknown)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise UserError(
                f"{file}: tensor {names[0]}{more} {problem}; fetch or write the checkpoint again, "
                "or mend its architecture"
            )
    for name, part in wanted.items():
        if tensors[name].shape != part.shape:
            raise UserError(
                f"{file}: tensor {name} has shape {list(tensors[name].shape)}, the architecture "
                f"calls for {list(part.shape)}; mend the architecture, or take another checkpoint"
            )
        where = torch_archive.region(file, name, tensors[name], part.blocks)
        if where.dtype.short is None:
            raise UserError(
                f"{file}: tensor {name} is {where.dtype}; save weights in one of "
                f"{', '.join(dtypes.OF_WEIGHTS)}"
            )
        yield replace(where, is_copy=part.is_copy)


def in_order(module: Any, tree: Any) -> dict[str, TensorSlice]:
    """Parts of a tree in the order in which a file has their tensors, which is that of parameters.

    Args:
        module: what `torch_pickles.read` has found in the file.
        tree: see `found`, which has seen that all are there.
    """
    wanted = dict(named(tree))
    return {name: wanted[name] for name in _by_name(module, wanted) if name in wanted}


def _by_name(module: Any, wanted: Container[str] = ()) -> dict[str, Any]:
    """Values by our names."""
    found = {newer(name): value for name, value in torch_archive.leaves(module)}
    if _TIED_HEAD in wanted and _HEAD not in wanted and _HEAD in found:
        found[_TIED_HEAD] = found.pop(_HEAD)  # as megatron.core calls it, and has it last
    return found


def layers(module: Any) -> set[int]:
    """Numbers of the layers that a module has tensors of."""
    found = (_LAYER.search(name) for name in _by_name(module))
    return {int(each[1]) for each in found if each}


def is_core(module: Any) -> bool:
    """Whether a module's names are those of megatron.core."""
    return any(name.startswith("decoder.") for name, _ in torch_archive.leaves(module))


def vocabulary_rows(file: Path, module: Any) -> int:
    """Rows of the embedding that a rank's file has.

    Raises:
        UserError: it has none.
    """
    for name, value in torch_archive.leaves(module):
        if name.endswith("word_embeddings.weight") and isinstance(value, Located):
            return value.shape[0]
    raise UserError(
        f"{file}: has no word_embeddings.weight; give a checkpoint of Megatron with its weights"
    )


def named(tree: Any, prefix: str = "") -> Iterator[tuple[str, TensorSlice]]:
    """Parts in a tree that are nested in any way, by names with dots."""
    # A part is a tuple, which `leaves` would go into.
    if isinstance(tree, TensorSlice):
        yield prefix.removesuffix("."), tree
        return
    for name, value in tree.items():
        yield from named(value, f"{prefix}{name}.")


def newer(name: str) -> str:
    """Name here of a tensor of an earlier Megatron, or of megatron.core."""
    for before, after in (*_OLDER, *_CORE):
        name = re.sub(before, after, name)
    return name


def shapes_of(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Shapes of whole weights, by the keys of `Checkpoint.source`."""
    from tokamake.checkpoint import model_tensors

    return {
        f"model.{name}": tuple(shape) for name, shape in model_tensors.shapes(architecture).items()
    }
