"""Tensors of each tensor-parallel rank of Megatron: names, shapes, chunks of whole tensors.

Megatron fuses query, key and value, fuses gate and up projection, and pads the vocabulary. Formats
derived from Megatron's spread these tensors over files. Whole tensors have Hugging Face's names.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, NamedTuple

from tokamake import plugins
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.megatron_model import fused_qkv
from tokamake.checkpoint.megatron_model.padded_vocabulary import padded_rows, padded_size
from tokamake.checkpoint.tensors.checkpoint import Target
from tokamake.checkpoint.tensors.extents import Chunk, row_slices, whole_slices
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError, divisor
from tokamake.models.common.megatron_format import MegatronModule
from tokamake.models.common.tensor_shapes import ROUTER_BIAS
from tokamake.parallel.axis import Axis, part

_KINDS = {"weight": "weight", "bias": "bias", ROUTER_BIAS: "expert_bias", "sinks": "softmax_offset"}
"""Last parts of our names and Megatron's."""
Stack = Literal["encoder", "decoder"]
"""Megatron's names of the stacks of layers; its GPT is an encoder here."""


class TensorSlice(NamedTuple):
    """A rank's slice of one of Megatron's tensors."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    is_replica: bool = False
    """Whether a lower rank has the same slice."""
    split: Literal["copied", "rows", "columns", "heads", "vocabulary"] = "copied"
    """How ranks share the tensor: see `MegatronModule`; the vocabulary is split by padded rows."""
    of_module: bool | None = None
    """`MegatronModule.decays`."""
    of_stack: bool = False
    """Whether it is a member of a stack, such as experts, which expert-parallel ranks share."""

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer changes it: biases that balance experts have no gradient."""
        return not any(chunk.key.endswith(model_tensors.WITHOUT_GRADIENT) for chunk in self.chunks)

    @property
    def decays(self) -> bool:
        """Whether the tensor has weight decay: norms and biases have none."""
        return len(self.shape) > 1 if self.of_module is None else self.of_module


@dataclass(frozen=True)
class TensorParallelRank:
    """A tensor-parallel rank of a model."""

    architecture: Architecture
    """Shape of the model, vocab_size filled in."""
    axis: Axis
    """The rank among its peers."""
    padded_vocab_size: int
    """Rows of the embedding on all ranks together."""
    version: float = 3.0
    """Megatron's checkpoint version, which decides the order of queries, keys and values."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    """Shapes of our whole tensors by name; empty: all of the model."""
    tower: str = ""
    """The tower of the model whose tensors these are; empty: the whole model."""
    experts: Axis = Axis()  # noqa: RUF009
    """The rank among expert-parallel peers. Each has some experts, and all other tensors."""

    def __post_init__(self) -> None:
        shape, size = self.architecture, self.axis.size
        if not _is_in_megatron(shape.family):
            why = plugins.constant("models/*/hf", shape.family, "NOT_IN_MEGATRON", default="")
            reason = f": {why}" if why else ""
            raise UserError(
                f"format: Megatron has no model of family {shape.family}{reason}; choose the "
                "format hf or native"
            )
        divided = {
            "num_attention_heads": shape.num_attention_heads,
            "expert_size" if shape.has_routers else "intermediate_size": shape.expert_size,
            "padded vocabulary": self.padded_vocab_size,
        }
        # megatron.core has no ranks that share a key and value head.
        is_core = getattr(plugins.load("models/*/megatron", shape.family), "IS_CORE", False)
        if shape.num_key_value_heads > 1 or is_core:
            divided["num_key_value_heads"] = shape.num_key_value_heads
        for name, number in divided.items():
            if number % size:
                raise UserError(
                    f"tensor_parallel_size: {size}: does not divide {name} {number}, as Megatron "
                    f"needs; give {divisor(number)}"
                )
        has_cross_attention = shape.has_decoder or shape.has_neighbors
        if has_cross_attention and shape.num_key_value_heads != shape.num_attention_heads:
            models, formats = "encoder-decoders have", "hf or native"
            if shape.has_neighbors:
                models, formats = "Retros have", "native"
            raise UserError(
                f"num_key_value_heads: {shape.num_key_value_heads}: Megatron's {models} as many as "
                f"query heads, {shape.num_attention_heads}; choose the format {formats}"
            )

    def towers(self) -> "list[TensorParallelRank]":
        """The towers of a model; empty: it has none, or this is one."""
        family = plugins.load("models/*/megatron", self.architecture.family)
        names = family.towers(self.architecture) if self.architecture.has_towers else ()
        return [] if self.tower else [replace(self, tower=name) for name in names]

    def embedding(self) -> dict[str, TensorSlice]:
        model = self._model
        slices = {"word_embeddings.weight": self._vocabulary(f"{model}.embed_tokens.weight")}
        family = plugins.load("models/*/megatron", self.architecture.family)
        for name, ours in getattr(family, "EMBEDDING", {}).items():
            slices |= self._copied(name, ours.replace("model", model, 1))
        return slices

    def layer(self, number: int, stack: Stack = "encoder") -> dict[str, TensorSlice]:
        """Tensors of a layer, in the order in which Megatron makes them: optimizers keep it."""
        family = plugins.load("models/*/megatron", self.architecture.family)
        if hasattr(family, "layer"):
            modules = family.layer(self.architecture, number)
        else:
            modules = family.DECODER_LAYER if stack == "decoder" else family.LAYER
        return self._modules(modules, f"{self._root(stack)}.layers.{number}.")

    def mtp_layers(self) -> dict[str, TensorSlice]:
        """Tensors of the layers that predict further tokens, which Megatron numbers from 0."""
        return {
            f"layers.{index}.{name}": tensor
            for index, number in enumerate(self.architecture.mtp_layers)
            for name, tensor in self.layer(number).items()
        }

    def heads(self) -> dict[str, TensorSlice]:
        """Tensors after the last norm beside the output layer, by their names in the model."""
        family = plugins.load("models/*/megatron", self.architecture.family)
        return self._modules(getattr(family, "HEADS", ()), f"{self._model}.")

    def _modules(self, modules: Iterable[MegatronModule], prefix: str) -> dict[str, TensorSlice]:
        """Tensors of modules; `prefix` begins our names."""
        slices: dict[str, TensorSlice] = {}
        known = [
            module
            for module in modules
            if any(f"{prefix}{module.ours[0]}.{kind}" in self._shapes for kind in _KINDS)
        ]
        for is_stacked, group in groupby(known, key=lambda module: "{}" in module.name):
            slices |= (self._stacked if is_stacked else self._plain)([*group], prefix)
        return slices

    def _plain(self, modules: list[MegatronModule], prefix: str) -> dict[str, TensorSlice]:
        return {
            name: tensor._replace(of_module=module.decays)
            for module in modules
            for name, tensor in self._module(module, [f"{prefix}{name}" for name in module.ours])
        }

    def _stacked(self, modules: list[MegatronModule], prefix: str) -> dict[str, TensorSlice]:
        """Tensors of this rank's members of stacks, such as experts; their names count from 0."""
        ours = [
            f"{prefix}{name}.{kind}" for each in modules for name in each.ours for kind in _KINDS
        ]
        shapes = {name: self._shapes[name] for name in ours if name in self._shapes}
        number, size = next(iter(shapes.values()))[0], self.experts.size
        if number % size:
            raise UserError(
                f"expert_parallel_size: {size}: does not divide {number} experts, as Megatron "
                f"needs; give {divisor(number)}"
            )
        member = replace(self, shapes={name: shape[1:] for name, shape in shapes.items()})
        of_member = member._plain(modules, prefix)
        return {
            name.format(place): tensor._replace(
                chunks=tuple(chunk.in_stack(index) for chunk in tensor.chunks), of_stack=True
            )
            for place, index in enumerate(part(number, self.experts))
            for name, tensor in of_member.items()
        }

    def _module(self, module: MegatronModule, ours: list[str]) -> Iterator[tuple[str, TensorSlice]]:
        match module.split:
            case "heads":
                slices = self._fused_qkv(module.name, *ours)
            case "vocabulary":
                slices = {
                    f"{module.name}.{_KINDS[kind]}": self._vocabulary(f"{ours[0]}.{kind}")
                    for kind in _KINDS
                    if f"{ours[0]}.{kind}" in self._shapes
                }
            case "rows":
                slices = self._rows(module.name, ours)
            case "columns":
                slices = self._columns(module.name, *ours)
            case _:
                slices = self._copied(module.name, *ours)
        yield from slices.items()

    def norm(self, stack: Stack = "encoder") -> dict[str, TensorSlice]:
        """Tensors of the norm after the last layer of a stack."""
        return self._copied("", f"{self._root(stack)}.norm")

    @property
    def _model(self) -> str:
        """Beginning of our names of the tensors."""
        return f"model.{self.tower}" if self.tower else "model"

    def _root(self, stack: Stack) -> str:
        """Beginning of our names of the tensors of a stack."""
        return f"model.{stack}" if self.architecture.has_decoder else self._model

    def output_layer(self) -> dict[str, TensorSlice]:
        """The output layer, empty where it is the embedding."""
        if self.architecture.tie_word_embeddings:
            return {}
        return {"weight": self._vocabulary("lm_head.weight")}

    @functools.cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.shapes or _shapes(self.architecture.model_dump_json())

    def _copied(self, name: str, ours: str) -> dict[str, TensorSlice]:
        """A module that every rank has whole."""
        shapes = {kind: self._shapes.get(f"{ours}.{kind}") for kind in _KINDS}
        return {
            f"{name}.{_KINDS[kind]}".removeprefix("."): TensorSlice(
                shape, (Chunk(f"model.{ours}.{kind}", whole_slices(shape)),), self.axis.rank > 0
            )
            for kind, shape in shapes.items()
            if shape is not None
        }

    def _fused_qkv(self, name: str, *ours: str) -> dict[str, TensorSlice]:
        """Query, key and value in one, by heads; or key and value, of cross-attention."""
        sizes = {kind: self._shapes.get(f"{ours[0]}.{kind}") for kind in _KINDS}
        shapes = {kind: shape for kind, shape in sizes.items() if shape is not None}
        if self.architecture.num_key_value_heads == 1 and self.axis.size > 1:
            return self._multi_query(name.rpartition(".")[0], ours, shapes=shapes)
        slices = {}
        for kind, (_, *columns) in shapes.items():
            chunks = (*self._fused(ours, kind, columns=(*columns,)),)
            rows = sum(chunk.slices[0].stop - chunk.slices[0].start for chunk in chunks)
            slices[f"{name}.{kind}"] = TensorSlice((rows, *columns), chunks, split="heads")
        return slices

    def _fused(
        self, ours: tuple[str, ...], kind: str, *, columns: tuple[int, ...]
    ) -> Iterator[Chunk]:
        start, row = 0, columns[0] if columns else 1
        order = fused_qkv.row_order(self.architecture, self.axis, version=self.version)
        for number, rows in order:
            if (place := number - 3 + len(ours)) < 0:  # the query of cross-attention
                continue
            yield Chunk(f"model.{ours[place]}.{kind}", row_slices(rows, columns), start)
            start += len(rows) * row

    def _multi_query(
        self, module: str, ours: tuple[str, ...], *, shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, TensorSlice]:
        """Queries that ranks share; one key and value head that every rank has."""
        head = self.architecture.head_dim
        slices: dict[str, TensorSlice] = {}
        for kind, (num_rows, *columns) in shapes.items():
            rows = part(num_rows, self.axis)
            chunk = Chunk(f"model.{ours[0]}.{kind}", row_slices(rows, (*columns,)))
            slices[f"{module}.query.{kind}"] = TensorSlice(
                (len(rows), *columns), (chunk,), split="heads"
            )
        for kind, (_, *columns) in shapes.items():
            start = head * (columns[0] if columns else 1)
            chunks = tuple(
                Chunk(f"model.{name}.{kind}", row_slices(range(head), (*columns,)), number * start)
                for number, name in enumerate(ours[1:])
            )
            slices[f"{module}.key_value.{kind}"] = TensorSlice(
                (2 * head, *columns), chunks, self.axis.rank > 0
            )
        return slices

    def _rows(self, name: str, ours: list[str]) -> dict[str, TensorSlice]:
        """Projections in one tensor, some outputs of each on every rank."""
        slices: dict[str, TensorSlice] = {}
        for kind in _KINDS:
            names = [f"{each}.{kind}" for each in ours if f"{each}.{kind}" in self._shapes]
            if not names:
                continue
            num_rows, *columns = self._shapes[names[0]]
            rows = self._part(num_rows, names[0])
            width = columns[0] if columns else 1
            chunks = tuple(
                Chunk(f"model.{each}", row_slices(rows, (*columns,)), number * len(rows) * width)
                for number, each in enumerate(names)
            )
            slices[f"{name}.{_KINDS[kind]}"] = TensorSlice(
                (len(names) * len(rows), *columns), chunks, split="rows"
            )
        return slices

    def _columns(self, name: str, ours: str) -> dict[str, TensorSlice]:
        """A projection, some inputs of it on every rank, and its whole bias."""
        rows, width = self._shapes[f"{ours}.weight"]
        inputs = self._part(width, f"{ours}.weight")
        slices = (slice(0, rows), slice(inputs.start, inputs.stop))
        chunk = Chunk(f"model.{ours}.weight", slices)
        weight = TensorSlice((rows, len(inputs)), (chunk,), split="columns")
        return self._copied(name, ours) | {f"{name}.weight": weight}

    def _part(self, size: int, ours: str) -> range:
        """This rank's rows or columns of one of our tensors, as many as another rank's."""
        if size % self.axis.size:
            raise UserError(
                f"tensor_parallel_size: {self.axis.size}: does not divide {size}, the width of "
                f"{ours}, as Megatron needs; give {divisor(size)}"
            )
        return part(size, self.axis)

    def _vocabulary(self, ours: str) -> TensorSlice:
        """Rows of an embedding, an output layer or its bias, with padding."""
        shape, rows = self._shapes[ours], part(self.padded_vocab_size, self.axis)
        chunks = padded_rows(f"model.{ours}", shape, rows=rows)
        return TensorSlice((len(rows), *shape[1:]), chunks, split="vocabulary")


@functools.cache
def _is_in_megatron(family: str) -> bool:
    return family in plugins.names("models/*/megatron")


@functools.cache
def _shapes(described: str) -> dict[str, tuple[int, ...]]:
    # Every layer asks for the shapes; the JSON text of the architecture is the key of the cache.
    architecture = Architecture.model_validate_json(described)
    return {name: tuple(size) for name, size in model_tensors.shapes(architecture).items()}


def target_ranks(architecture: Architecture, target: Target) -> list[TensorParallelRank]:
    """Return the tensor-parallel ranks of a checkpoint to write."""
    assert architecture.vocab_size is not None, "an open checkpoint has a vocabulary size"
    size, experts = target.layout.tensor_parallel_size, target.layout.expert_parallel_size
    if experts > 1 and not architecture.has_routers:
        raise UserError(
            f"expert_parallel_size: {experts}: family {architecture.family} has no experts; give 1"
        )
    if size > 1 and architecture.has_routers and architecture.mlp_bias:
        raise UserError(
            f"tensor_parallel_size: {size}: Megatron divides no experts with biases; give 1, or "
            "choose the format torch-dist, which any layout loads"
        )
    multiple = target.make_vocab_size_divisible_by * size
    rows = padded_size(architecture.vocab_size, multiple)
    return [TensorParallelRank(architecture, Axis(number, size), rows) for number in range(size)]
