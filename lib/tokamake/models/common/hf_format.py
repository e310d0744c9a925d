"""How a family's models are stored as one of transformers' model types: config.json and tensors.

A file of models/stored has a `HFFormat` a model type in `HUGGING_FACE`; `checkpoint.hugging_face`
reads and writes folders by it. Our own names are those of Hugging Face's Llama, for all families.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tokamake.config.architecture import SCALING, Architecture

if TYPE_CHECKING:
    from torch import Tensor

_ROPE_TYPES = ("default", *SCALING)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, eq=False)
class HFFormat:
    """One of transformers' model types."""

    model_type: str
    """Its name in config.json."""
    class_name: str
    """transformers' class of such models."""
    keys: Mapping[str, tuple[str, ...]]
    """Keys of config.json by fields of `Architecture`: the one to write, then its other names."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes missing keys for, by our fields."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Fields that all such models have alike."""
    covered: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that change the model, and the values that our model covers."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are written as they are."""
    to_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    """Fields from the others and from config.json, where no key says it plainly."""
    to_keys: Callable[[Architecture], dict[str, Any]] = _nothing
    """The inverse."""
    prefix: str = "model."
    """What all tensors' names begin with but the output layer's; old files leave it out."""
    layers: str = "layers"
    """Name of the list of layers."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of modules that differ, by ours."""
    fused: str | None = None
    """Name of the module that has query, key and value in one."""
    fused_rows: Literal["stacked", "grouped"] = "grouped"
    """All queries, then keys, then values; or these of each key and value head in turn."""
    transposed: bool = False
    """Whether weights of projections lie as (inputs, outputs)."""
    ignored: str = "$^"
    """Pattern of tensors' names that hold no weights."""

    def name(self, ours: str) -> str:
        """Name of a tensor, by ours; where fused, that of the whole."""
        if found := _LAYER.fullmatch(ours):
            number, module, kind = found.groups()
            if self.fused and module in (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
            ):
                module = self.fused
            return f"{self.prefix}{self.layers}.{number}.{self.names.get(module, module)}.{kind}"
        module, _, kind = ours.rpartition(".")
        if module == "lm_head":
            return ours
        module = module.removeprefix("model.")
        return f"{self.prefix}{self.names.get(module, module)}.{kind}"

    def to_theirs(
        self, architecture: Architecture, tensors: "Mapping[str, Tensor]"
    ) -> "dict[str, Tensor]":
        """Rename, fuse and transpose our tensors; what does not change is not copied."""
        theirs = {}
        for name, tensor in tensors.items():
            if self.fused and re.search(r"self_attn\.[kv]_proj\.", name):
                continue
            if self.fused and "self_attn.q_proj." in name:
                qkv = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                tensor = self._fuse(architecture, qkv)
            theirs[self.name(name)] = tensor.mT if self.turns(name) else tensor
        return theirs

    def to_ours(
        self, architecture: Architecture, theirs: "Mapping[str, Tensor]", names: Mapping[str, Any]
    ) -> "dict[str, Tensor]":
        """The inverse.

        Args:
            architecture: shape of the model.
            theirs: as `to_theirs` returns them.
            names: of our tensors.
        """
        ours: dict[str, Tensor] = {}
        for name in names:
            tensor = theirs[self.name(name)]
            if self.turns(name):
                tensor = tensor.mT
            if self.fused and (part := re.search(r"self_attn\.([qkv])_proj\.", name)):
                tensor = self._split(architecture, tensor)["qkv".index(part[1])]
            ours[name] = tensor.contiguous()
        return ours

    def rows(self, architecture: Architecture, name: str, number: int) -> list[tuple[slice, int]]:
        """Where the rows of a tensor of ours lie in theirs, before that is transposed.

        Args:
            architecture: shape of the model.
            name: of ours.
            number: of its rows.

        Returns:
            Runs of its rows, each with the row of theirs at which it begins.
        """
        part = re.search(r"self_attn\.([qkv])_proj\.", name)
        if not self.fused or not part:
            return [(slice(0, number), 0)]
        heads = architecture.num_key_value_heads
        groups = heads if self.fused_rows == "grouped" else 1
        query, key_value = architecture.query_size // groups, architecture.key_value_size // groups
        widths, index = (query, key_value, key_value), "qkv".index(part[1])
        before, own, group = sum(widths[:index]), widths[index], sum(widths)
        return [(slice(n * own, (n + 1) * own), n * group + before) for n in range(groups)]

    def turns(self, name: str) -> bool:
        """Whether a tensor of ours lies transposed in theirs."""
        return self.transposed and name.endswith("_proj.weight")

    def _fuse(self, architecture: Architecture, qkv: "list[Tensor]") -> "Tensor":
        import torch

        if self.fused_rows == "stacked":
            return torch.cat(qkv)
        return fuse_by_group(architecture, qkv)

    def _split(self, architecture: Architecture, fused: "Tensor") -> "list[Tensor]":
        if self.fused_rows == "grouped":
            return split_by_group(architecture, fused)
        width = architecture.key_value_size
        return [*fused.split((architecture.query_size, width, width))]

    def uncovered(self, config: Mapping[str, Any]) -> str | None:
        """What a message says of the first key that makes a model that ours cannot be."""
        for key, values in {**self.covered, "quantization_config": (None,)}.items():
            if key in config and config[key] not in values:
                value = config[key]
                return f"{key}: {value!r} is not supported; choose a model with {values[0]!r}"
        if other := sorted({*(config.get("layer_types") or ())} - {"full_attention"}):
            return f"layer_types: {other[0]!r} is not supported; choose a model with full_attention"
        key = _rope_key(config)
        parameters = config.get(key) or {}
        turned = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if self.rotary and (_rope_type(parameters) not in _ROPE_TYPES or turned not in (None, 1)):
            return (
                f"{key}: {json.dumps(parameters)} is not supported; choose a model that turns "
                f"whole heads and whose rope_type is one of {', '.join(_ROPE_TYPES)}"
            )
        return None

    def fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Values of an `Architecture` that config.json says; not checked, some may be missing."""
        values = dict(self.defaults)
        for name, keys in self.keys.items():
            given = [config[key] for key in keys if config.get(key) is not None]
            values |= {name: given[0]} if given else {}
        values |= self.implied
        if self.rotary:
            values |= _rope_fields(config)
        if "num_attention_heads" in values:
            values.setdefault("num_key_value_heads", values["num_attention_heads"])
        values |= self.to_fields({**config, **values})
        return values

    def config(self, architecture: Architecture) -> dict[str, Any]:
        """Keys of config.json that say the shape of a model."""
        # A head_dim that follows from the rest is not in `values`.
        values = architecture.model_dump()
        keys = {keys[0]: values[name] for name, keys in self.keys.items() if name in values}
        rope = _rope_keys(architecture) if self.rotary else {}
        return {**keys, **rope, **self.constants, **self.to_keys(architecture)}

    @property
    def rotary(self) -> bool:
        """Whether such models have rotary positions."""
        return self.implied["position_embedding"] == "rotary"

    def nearest(self, architecture: Architecture) -> dict[str, Any]:
        """Fields of the nearest model that this type can hold."""
        fields = self.fields(self.config(architecture))
        hidden, heads = architecture.hidden_size, architecture.num_attention_heads
        width = hidden / heads  # of types that have no key for it
        return {"head_dim": int(width) if width.is_integer() else width, **fields}

    def differences(self, architecture: Architecture) -> list[str]:
        """Fields whose values this type cannot hold."""
        fields, values = self.nearest(architecture), architecture.model_dump(exclude_none=True)
        return [name for name, value in values.items() if fields.get(name, value) != value]


def _rope_key(config: Mapping[str, Any]) -> str:
    """The key that transformers reads, the older one first."""
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def _rope_type(parameters: Mapping[str, Any]) -> str:
    kind: str = parameters.get("rope_type") or parameters.get("type") or "default"
    return kind


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling: beside each other in transformers 4, both in rope_parameters in 5."""
    parameters = config.get(_rope_key(config)) or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind, beside = _rope_type(parameters), {"rope_theta", "type", "partial_rotary_factor"}
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    scaling = {name: value for name, value in parameters.items() if name not in beside}
    if kind in ("llama3", "yarn") and "max_position_embeddings" in config:
        scaling.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return {"rope_theta": theta, "rope_scaling": scaling | {"rope_type": kind}}


def _rope_keys(architecture: Architecture) -> dict[str, Any]:
    scaling, theta = architecture.rope_scaling, architecture.rope_theta
    if scaling is None:
        return {
            "rope_theta": theta,
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        }
    values = scaling.model_dump(exclude_none=True)
    return {
        "rope_theta": theta,
        "rope_scaling": values,  # of transformers 4; 5 reads it, too
        "rope_parameters": {"rope_theta": theta, **values},
    }


def fuse_by_group(architecture: Architecture, qkv: "list[Tensor]") -> "Tensor":
    """One tensor whose rows are, for each key and value head, its query heads, the key, the value.

    Args:
        architecture: shape of the model.
        qkv: weights or biases of query, key and value, heads in their first dimension.
    """
    import torch

    groups = (architecture.num_key_value_heads, -1)
    return torch.cat([part.unflatten(0, groups) for part in qkv], dim=1).flatten(0, 1)


def split_by_group(architecture: Architecture, fused: "Tensor") -> "list[Tensor]":
    """The inverse: query, key and value."""
    groups, head = architecture.num_key_value_heads, architecture.head_dim
    queries = architecture.query_size // groups
    grouped = fused.unflatten(0, (groups, queries + 2 * head))
    return [part.flatten(0, 1) for part in grouped.split((queries, head, head), dim=1)]
