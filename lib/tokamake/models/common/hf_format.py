"""How a family's models are stored as one of transformers' model types: config.json and tensors.

A family's hf.py has `shapes`, the shape of every tensor of an architecture by its name, and in
`HUGGING_FACE` an `HFFormat` for each model type of transformers; `checkpoint.hf` reads and writes
folders by it, and writes the first type that fits. `REFUSED` names similar model types, and why
they are other models. Our tensors have the names of Hugging Face's Llama, in all families.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokamake.config.architecture import Architecture
from tokamake.config.rope_scaling import SCALING
from tokamake.models.common import hf_rope
from tokamake.models.common.hf_windows import Windows, without_windows

_ROPE_TYPES = ("default", *SCALING)
_FIRST_LENGTH = "original_max_position_embeddings"
_LAYER = re.compile(r"model\.((?:\w+\.)?)layers\.(\d+)\.(.+)\.(weight|bias)")
_GATE_UP = re.compile(r"mlp\.(gate|up)_proj\b")
_QKV = re.compile(r"self_attn\.([qkv])_proj\b")


def _nothing(_: Any) -> dict[str, Any]:
    return {}


_REASONS = {
    "use_sliding_window": ": no published model of this type has windows, so they are left out",
}
"""Why values of keys are not supported, as it stands in messages."""


def _no_problem(_: Any) -> None:
    return None


def same_keys(*names: str) -> dict[str, tuple[str, ...]]:
    """`HFFormat.keys` of fields that have the same names in config.json."""
    return {name: (name,) for name in names}


SHAPE_KEYS = same_keys(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    "hidden_act",
)
"""Keys of most model types."""
GATED_KEYS = SHAPE_KEYS | same_keys("rms_norm_eps", "tie_word_embeddings", "initializer_range")
"""Keys of model types with RMSNorms and gated MLPs."""

EXPERT_NAMES = {
    f"mlp.experts.{each}_proj": f"mlp.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")
}
"""`HFFormat.names` of stacks of experts, whose files have a tensor for each expert."""


@dataclass(frozen=True, eq=False)
class HFFormat:
    """One of transformers' model types."""

    model_type: str
    """Its name in config.json."""
    class_name: str
    """transformers' class of such models."""
    keys: Mapping[str, tuple[str, ...]]
    """Keys of config.json by fields of `Architecture`: the key to write, then its other names."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers uses for missing keys, by our fields."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Fields that have the same value in all such models."""
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that change the model, and the values that our model supports."""
    problem: Callable[[Mapping[str, Any]], str | None] = _no_problem
    """Message about keys that together ask for a model that ours cannot be."""
    equal: Mapping[str, str] = field(default_factory=dict)
    """Keys that must have the value of another key."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys that every config.json gets."""
    dropout: Mapping[str, str] = field(default_factory=dict)
    """Keys of rates of dropout, and the rate in `train.dropout` that each has."""
    dropout_as_hidden: tuple[str, ...] = ()
    """Rates in `train.dropout` without a key: such models drop at the rate of hidden states."""
    extra_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    """Fields that follow from other fields and keys together."""
    extra_keys: Callable[[Architecture], dict[str, Any]] = _nothing
    """The inverse."""
    prefix: str = "model."
    """Start of all tensor names but the output layer's; old files lack it."""
    layers: str = "layers"
    """Name of the list of layers."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Our names of modules → other names in the format. A layer's modules may begin with its stack,
    such as `decoder.mlp.up_proj`. A name with `{}` is of a module that stacks modules along its
    first dimension, such as experts: each is stored by itself, with its number there."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Names of modules outside the prefix, by ours without `model.`."""
    copies: Mapping[str, str] = field(
        default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"}
    )
    """Tensors that some files have beside our tensors with the same content, if the output layer is
    tied."""
    twice: Mapping[str, str] = field(default_factory=dict)
    """Tensors that all files have beside our tensors with the same content."""
    as_rows: Mapping[str, str] = field(default_factory=dict)
    """Whole names of tensors that are stored as a matrix of one row, by ours."""
    fused: str | None = None
    """Name of the module that has query, key and value in one."""
    fused_rows: Literal["stacked", "grouped"] = "grouped"
    """Rows of that module: all queries, then keys, then values; or query heads, key and value of
    each key and value head in turn."""
    fused_mlp: str | None = None
    """Name of the module that has the gate, then the up projection in one."""
    windows: Windows | None = None
    """Windows of attention; None: such models have none."""
    rope_types: tuple[str, ...] = _ROPE_TYPES
    """Kinds of rotary positions that transformers has for such models."""
    first_length: int | None = None
    """original_max_position_embeddings of a config without it; None: max_position_embeddings."""
    rope_base: str = "rope_theta"
    """Older key of the base of rotary positions."""
    local_rope_base: str = ""
    """Older key of the base in layers with a window, for types with `local_rope_theta`."""
    partial_rotary: str | None = None
    """Older key of partial_rotary_factor, for types whose heads may rotate in part."""
    output: str = "lm_head"
    """Name of the output layer."""
    transposed: bool = False
    """Whether weights of projections have the shape (inputs, outputs)."""
    ignored: str = "$^"
    """Pattern of names of tensors that hold no weights."""
    interleaves_experts: bool = False
    """Whether a layer has one tensor with the gates and up projections of all experts, inputs by
    outputs, a gate and an up projection in turns; also read as MXFP4."""
    has_mtp_layers: bool = False
    """Whether files may have layers after the last one, which predict further tokens (MTP).
    transformers ignores them."""

    def name(self, ours: str) -> str:
        """Name of a tensor, by ours; for query, key or value, the name of the fused tensor."""
        if ours in self.as_rows:
            return self.as_rows[ours]
        if match := _LAYER.fullmatch(ours):
            stack, number, module, kind = match.groups()
            if self.fused and _QKV.fullmatch(module):
                module = self.fused
            elif self.fused_mlp and _GATE_UP.fullmatch(module):
                module = self.fused_mlp
            module = self.names.get(stack + module) or self.names.get(module, module)
            return f"{self.prefix}{stack}{self.layers}.{number}.{module}.{kind}"
        module, _, kind = ours.rpartition(".")
        if module == "lm_head":
            return f"{self.output}.{kind}"
        module = module.removeprefix("model.")
        if module in self.heads:
            return f"{self.heads[module]}.{kind}"
        return f"{self.prefix}{self.names.get(module, module)}.{kind}"

    def stored_names(self, ours: str, shape: Sequence[int]) -> list[tuple[str, int | None]]:
        """Stored tensors with parts of our tensor: name, and index of the part in the stack.

        None: the tensor is no stack.
        """
        name = self.name(ours)
        if "{}" not in name:
            return [(name, None)]
        return [(name.format(index), index) for index in range(shape[0])]

    def mtp_copies(self, architecture: Architecture) -> dict[str, str]:
        """Copies of the embedding and the output layer in MTP layers, and our tensors there."""
        embedding = "model.embed_tokens.weight"
        output = embedding if architecture.tie_word_embeddings else "lm_head.weight"
        return {
            f"{self.prefix}{self.layers}.{number}.{name}.weight": ours
            for number in architecture.mtp_layers
            for name, ours in (("embed_tokens", embedding), ("shared_head.head", output))
        }

    def is_outside(self, name: str) -> bool:
        """Whether a stored tensor has no prefix, even in a whole model."""
        heads = (f"{self.output}.", *self.heads.values(), *self.as_rows.values())
        return name.startswith(heads) or name in self.copies

    def rows(self, architecture: Architecture, name: str, number: int) -> list[tuple[slice, int]]:
        """Ranges of rows of our tensor, and where each begins in the stored, untransposed one."""
        if self.fused_mlp and (half := _GATE_UP.search(name)):
            return [(slice(0, number), 0 if half[1] == "gate" else number)]
        part = _QKV.search(name)
        if not self.fused or not part:
            return [(slice(0, number), 0)]
        groups = architecture.num_key_value_heads if self.fused_rows == "grouped" else 1
        query, key_value = architecture.query_size // groups, architecture.key_value_size // groups
        sizes, index = (query, key_value, key_value), "qkv".index(part[1])
        start, size, stride = sum(sizes[:index]), sizes[index], sum(sizes)
        return [
            (slice(group * size, (group + 1) * size), group * stride + start)
            for group in range(groups)
        ]

    def is_transposed(self, name: str) -> bool:
        """Whether our tensor is stored transposed."""
        return self.transposed and name.endswith("_proj.weight")

    def unsupported(self, config: Mapping[str, Any]) -> str | None:
        """Message about the first key that asks for a model that ours cannot be."""
        for key, values in self.supported.items():
            if key in config and config[key] not in values:
                value, reason = config[key], _REASONS.get(key, "")
                return (
                    f"{key}: {value!r} is not supported{reason}; choose a model with {values[0]!r}"
                )
        if problem := self.problem(config):
            return problem
        for key, other_key in self.equal.items():
            if other_key in config and config.get(key) not in (None, config[other_key]):
                value = config[other_key]
                return f"{key}: {config[key]!r} is not supported; choose a model with {value!r}"
        if problem := self.windows.problem(config) if self.windows else without_windows(config):
            return problem
        return self._rope_problem(config) if self.rotary else None

    def _rope_problem(self, config: Mapping[str, Any]) -> str | None:
        by_kind, model_type = self._rotates_by_kind, self.model_type
        if problem := hf_rope.nesting_problem(config, by_kind=by_kind, model_type=model_type):
            return problem
        key = hf_rope.rope_key(config)
        parameters, local = hf_rope.rope_parameters(config)
        if hf_rope.rope_type(parameters) not in self.rope_types:
            return (
                f"{key}: {json.dumps(parameters)} is not supported; choose a model whose rope_type "
                f"is one of {', '.join(self.rope_types)}"
            )
        share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if self.partial_rotary is None and share not in (None, 1):
            return (
                f"partial_rotary_factor: {share!r} is not supported; choose a model that turns "
                "whole heads"
            )
        if hf_rope.rope_type(local) != "default":
            return (
                f"{key}: {json.dumps(local)} is not supported in layers with a window; choose a "
                "model that stretches none of them"
            )
        return None

    def ignored_keys(self, config: Mapping[str, Any]) -> list[str]:
        """Settings of rotary positions that neither transformers nor our model reads."""
        parameters = hf_rope.rope_parameters(config)[0] if self.rotary else {}
        used = {"rope_theta", "type", "rope_type", "partial_rotary_factor"}
        used |= hf_rope.scaling_keys(hf_rope.rope_type(parameters))
        return [f"{hf_rope.rope_key(config)}.{name}" for name in parameters if name not in used]

    def fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of an `Architecture` that config.json states; unchecked, some may be missing."""
        values = dict(self.defaults)
        for name, keys in self.keys.items():
            stated = [config[key] for key in keys if config.get(key) is not None]
            values |= {name: stated[0]} if stated else {}
        values |= self.implied
        if self.rotary:
            values |= self._rope_fields(config)
        if "num_attention_heads" in values:
            values.setdefault("num_key_value_heads", values["num_attention_heads"])
        if self.windows:
            values |= self.windows.fields({**config, **values})
        values |= self.extra_fields({**config, **values})
        return values

    def config(self, architecture: Architecture) -> dict[str, Any]:
        """Keys of config.json that state the shape of a model."""
        # A head_dim that follows from the rest is not in `values`.
        values = architecture.model_dump()
        keys = {keys[0]: values[name] for name, keys in self.keys.items() if name in values}
        rope = self._rope_keys(architecture) if self.rotary else {}
        windows = self.windows.keys(architecture) if self.windows else {}
        return {**keys, **rope, **windows, **self.constants, **self.extra_keys(architecture)}

    def _rope_fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Base, scaling and share of heads: keys in transformers 4, all in rope_parameters in 5."""
        parameters, local = hf_rope.rope_parameters(config)
        theta = parameters.get("rope_theta") or config.get(self.rope_base)
        fields: dict[str, Any] = {"rope_theta": theta or self.defaults.get("rope_theta", 10000.0)}
        if self._rotates_by_kind:
            stated = local.get("rope_theta") or config.get(self.local_rope_base)
            fields |= {"local_rope_theta": float(stated)} if stated else {}
        if self.partial_rotary:
            shares = (parameters.get("partial_rotary_factor"), config.get(self.partial_rotary))
            of_heads = [float(share) for share in shares if share is not None]
            fields |= {"partial_rotary_factor": of_heads[0]} if of_heads else {}
        kind = hf_rope.rope_type(parameters)
        if kind == "default" or kind not in self.rope_types:
            return {**fields, "rope_scaling": None}
        known = hf_rope.scaling_keys(kind)
        scaling = {name: value for name, value in parameters.items() if name in known}
        if self._rotates_by_kind and not scaling.get("truncate", True):
            del scaling["truncate"]  # see `hf_rope.nesting_problem`
        longest = config.get("max_position_embeddings")
        if kind in ("llama3", "yarn", "longrope") and longest is not None:
            # As in transformers, a key outside counts before one inside.
            outside = config.get(_FIRST_LENGTH, self.first_length)
            outside = None if self._rotates_by_kind else outside
            scaling[_FIRST_LENGTH] = outside or scaling.get(_FIRST_LENGTH, longest)
            if kind != "llama3" and scaling.get("factor") is None:
                scaling["factor"] = max(1.0, longest / scaling[_FIRST_LENGTH])
        return {**fields, "rope_scaling": scaling | {"rope_type": kind}}

    def _rope_keys(self, architecture: Architecture) -> dict[str, Any]:
        scaling, theta = architecture.rope_scaling, architecture.rope_theta
        base: dict[str, Any] = {"rope_theta": theta}
        keys: dict[str, Any] = {self.rope_base: theta}
        if self.partial_rotary:
            share = architecture.setting("partial_rotary_factor")
            base |= {"partial_rotary_factor": share}
            keys |= {self.partial_rotary: share}
        values = {} if scaling is None else scaling.model_dump(exclude_none=True)
        whole = {**base, **(values or {"rope_type": "default"})}
        parameters: dict[str, Any] = whole
        if theta := architecture.local_rope_theta:
            keys |= {self.local_rope_base: theta} if self.local_rope_base else {}
            local = {"rope_theta": theta, "rope_type": "default"}
            parameters = {"full_attention": whole, "sliding_attention": local}
        if scaling is None:
            return {**keys, "rope_parameters": parameters}
        if self.first_length is not None and _FIRST_LENGTH in values:
            keys |= {_FIRST_LENGTH: values[_FIRST_LENGTH]}
        # transformers 4 reads rope_scaling. transformers 5 reads both keys.
        return {**keys, "rope_scaling": values, "rope_parameters": parameters}

    @property
    def _rotates_by_kind(self) -> bool:
        """Whether layers with a window have rotary positions of their own."""
        return "local_rope_theta" in self.defaults

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


def label_keys(names: Sequence[str]) -> dict[str, Any]:
    """Keys of config.json that name the classes of a task."""
    if not names:
        return {}
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def label_names(config: Mapping[str, Any]) -> list[str]:
    """Names of the classes in a config.json, by number; empty: they are transformers' defaults."""
    by_number = config.get("id2label")
    if not isinstance(by_number, Mapping) or not all(str(key).isdecimal() for key in by_number):
        return []
    names = [str(by_number[key]) for key in sorted(by_number, key=int)]
    return [] if names == [f"LABEL_{number}" for number in range(len(names))] else names
