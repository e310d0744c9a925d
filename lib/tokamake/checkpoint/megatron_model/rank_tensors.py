"""What each tensor-parallel rank of Megatron has of a model: names, shapes, boxes of whole tensors.

Tensors are Megatron's: query, key and value in one, gate and up projection in one, the vocabulary
padded. Checkpoint formats of its kin part these over files; whole tensors have our names.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.tensors.extents import Chunk
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis, part

Box = tuple[slice, ...]
_KINDS = ("weight", "bias")
_MODULES = (
    "input_layernorm",
    *(f"self_attention.{name}" for name in ("query_key_value", "query", "key_value", "dense")),
    "post_attention_layernorm",
    *(f"mlp.{name}" for name in ("dense_h_to_4h", "dense_4h_to_h")),
)
"""Of a layer, in the order in which Megatron makes them, which optimizers keep."""


class TensorSlice(NamedTuple):
    """What a rank has of one of Megatron's tensors."""

    shape: tuple[int, ...]
    blocks: tuple[Chunk, ...]
    is_copy: bool = False
    """Whether lower ranks have the same."""


@dataclass(frozen=True)
class Rank:
    """A tensor-parallel rank of a model.

    Raises:
        UserError: the model cannot be shared by so many ranks, as Megatron shares it.
    """

    architecture: Architecture
    """Shape of the model, vocab_size filled in."""
    axis: Axis
    """The rank among its peers."""
    padded_vocab_size: int
    """Rows of the embedding of all ranks."""
    version: float = 3.0
    """Megatron's checkpoint version, on which the order of queries, keys and values depends."""

    def __post_init__(self) -> None:
        shape, size = self.architecture, self.axis.size
        shared = {
            "num_attention_heads": shape.num_attention_heads,
            "intermediate_size": shape.intermediate_size,
            "padded vocabulary": self.padded_vocab_size,
        }
        if shape.num_key_value_heads > 1:
            shared["num_key_value_heads"] = shape.num_key_value_heads
        for name, number in shared.items():
            if number % size:
                raise UserError(
                    f"tensor_parallel_size: {size}: does not divide {name} {number}, so Megatron "
                    "cannot share this model so; give a divisor"
                )

    def embedding(self) -> dict[str, TensorSlice]:
        """Tensors of the embedding."""
        found = {"word_embeddings.weight": self._rows_of_words("model.embed_tokens.weight")}
        found |= self._copied("model.embed_layernorm.", "word_embeddings.norm.")
        found |= self._copied("model.embed_positions.", "position_embeddings.")
        return found

    def layer(self, number: int) -> dict[str, TensorSlice]:
        """Tensors of a layer."""
        prefix = f"model.layers.{number}."
        found: dict[str, TensorSlice] = {}
        for kind in _KINDS:
            found |= self._copied(f"{prefix}input_layernorm.{kind}", f"input_layernorm.{kind}")
            found |= self._attention(f"{prefix}self_attn.", kind)
            after = f"post_attention_layernorm.{kind}"
            found |= self._copied(prefix + after, after)
            found |= self._mlp(f"{prefix}mlp.", kind)
        return dict(sorted(found.items(), key=lambda named: _place(named[0])))

    def norm(self) -> dict[str, TensorSlice]:
        """Tensors of the last norm."""
        return self._copied("model.norm.", "")

    def output_layer(self) -> dict[str, TensorSlice]:
        """The output layer, where it is not the embedding."""
        if self.architecture.tie_word_embeddings:
            return {}
        return {"weight": self._rows_of_words("lm_head.weight")}

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return _shapes(self.architecture.model_dump_json())

    def _copied(self, prefix: str, name: str) -> dict[str, TensorSlice]:
        """Tensors that all ranks have whole, of those whose names begin so."""
        return {
            name + ours.removeprefix(prefix): TensorSlice(
                shape, (Chunk(f"model.{ours}", _whole(shape)),), self.axis.rank > 0
            )
            for ours, shape in self._shapes.items()
            if ours.startswith(prefix)
        }

    def _attention(self, prefix: str, kind: str) -> dict[str, TensorSlice]:
        found: dict[str, TensorSlice] = {}
        shape = self._shapes.get(f"{prefix}q_proj.{kind}")
        if shape is not None:
            wide = shape[1:]
            if self.architecture.num_key_value_heads == 1 and self.axis.size > 1:
                found |= self._multi_query(prefix, kind, wide)
            else:
                blocks = (*self._fused(prefix, kind, wide),)
                rows = sum(block.place[0].stop - block.place[0].start for block in blocks)
                found[f"self_attention.query_key_value.{kind}"] = TensorSlice((rows, *wide), blocks)
        return found | self._narrowing(f"{prefix}o_proj", "self_attention.dense", kind)

    def _fused(self, prefix: str, kind: str, wide: tuple[int, ...]) -> Iterator[Chunk]:
        start, row = 0, wide[0] if wide else 1
        for each, rows in self._order():
            yield Chunk(f"model.{prefix}{each}_proj.{kind}", _box(rows, wide), start)
            start += len(rows) * row

    def _order(self) -> Iterator[tuple[str, range]]:
        """Rows of queries, keys and values as they follow one another.

        From version 2 on, of each key and value head its query heads, the key, the value; in
        version 1 single rows of the three in turn; in version 0 all of a rank's queries, then keys,
        then values.
        """
        shape, head = self.architecture, self.architecture.head_dim
        groups = part(shape.num_key_value_heads, self.axis)
        queries = shape.num_attention_heads // shape.num_key_value_heads * head
        if self.version >= 2:
            for group in groups:
                yield "q", range(group * queries, (group + 1) * queries)
                for each in "kv":
                    yield each, range(group * head, (group + 1) * head)
        elif shape.num_attention_heads != shape.num_key_value_heads:
            raise UserError(f"checkpoint_version {self.version}: had no grouped queries")
        elif self.version >= 1:
            for row in range(groups.start * head, groups.stop * head):
                for each in "qkv":
                    yield each, range(row, row + 1)
        else:
            for each in "qkv":
                yield each, range(groups.start * head, groups.stop * head)

    def _multi_query(self, prefix: str, kind: str, wide: tuple[int, ...]) -> dict[str, TensorSlice]:
        """Queries that ranks share, one key and value that all of them have."""
        shape, head = self.architecture, self.architecture.head_dim
        own, row = part(shape.hidden_size, self.axis), wide[0] if wide else 1
        query = Chunk(f"model.{prefix}q_proj.{kind}", _box(own, wide))
        both = tuple(
            Chunk(f"model.{prefix}{each}_proj.{kind}", _box(range(head), wide), number * head * row)
            for number, each in enumerate("kv")
        )
        return {
            f"self_attention.query.{kind}": TensorSlice((len(own), *wide), (query,)),
            f"self_attention.key_value.{kind}": TensorSlice(
                (2 * head, *wide), both, self.axis.rank > 0
            ),
        }

    def _mlp(self, prefix: str, kind: str) -> dict[str, TensorSlice]:
        """Projections to more, gate and up in one, and back."""
        names = [f"{prefix}{each}_proj.{kind}" for each in ("gate", "up")]
        names = [name for name in names if name in self._shapes]
        found: dict[str, TensorSlice] = {}
        if names:
            wide = self._shapes[names[0]][1:]
            own = part(self.architecture.intermediate_size, self.axis)
            row = wide[0] if wide else 1
            blocks = tuple(
                Chunk(f"model.{name}", _box(own, wide), number * len(own) * row)
                for number, name in enumerate(names)
            )
            found[f"mlp.dense_h_to_4h.{kind}"] = TensorSlice((len(names) * len(own), *wide), blocks)
        return found | self._narrowing(f"{prefix}down_proj", "mlp.dense_4h_to_h", kind)

    def _narrowing(self, ours: str, name: str, kind: str) -> dict[str, TensorSlice]:
        """A projection whose inputs ranks share; its bias all have."""
        if kind == "bias":
            return self._copied(f"{ours}.bias", f"{name}.bias")
        rows, width = self._shapes[f"{ours}.weight"]
        own = part(width, self.axis)
        place = (slice(0, rows), slice(own.start, own.stop))
        return {
            f"{name}.weight": TensorSlice((rows, len(own)), (Chunk(f"model.{ours}.weight", place),))
        }

    def _rows_of_words(self, ours: str) -> TensorSlice:
        rows, width = self._shapes[ours]
        own = part(self.padded_vocab_size, self.axis)
        words = range(min(own.start, rows), min(own.stop, rows))
        padding = range(len(words), len(own))
        blocks = [Chunk(f"model.{ours}", _box(words, (width,)))] if words else []
        if padding:
            box = _box(padding, (width,))
            blocks.append(Chunk(f"model.{ours}", box, len(words) * width, is_mean=True))
        return TensorSlice((len(own), width), (*blocks,))


@functools.cache
def _shapes(described: str) -> dict[str, tuple[int, ...]]:
    """Shapes of an architecture's tensors; to find them, a model is built."""
    architecture = Architecture.model_validate_json(described)
    return {name: tuple(size) for name, size in model_tensors.shapes(architecture).items()}


def _place(name: str) -> tuple[int, int]:
    """Where a tensor comes in a layer."""
    module, _, kind = name.rpartition(".")
    return _MODULES.index(module), _KINDS.index(kind)


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, size) for size in shape)


def _box(rows: range, rest: tuple[int, ...]) -> Box:
    return (slice(rows.start, rows.stop), *_whole(rest))


def padded(architecture: Architecture, multiple: int, tensor_parallel_size: int) -> int:
    """Rows of Megatron's embedding: the vocabulary, made a multiple of so much on each rank."""
    assert architecture.vocab_size is not None, "fill in vocab_size before converting"
    each = multiple * tensor_parallel_size
    return -(-architecture.vocab_size // each) * each
