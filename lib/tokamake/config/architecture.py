"""Shape of a model, as the files of config/models state it.

A family's `SETTINGS` (lib/tokamake/models/<family>/model.py) lists its fields, with their defaults
and choices, beside the fields of all families. Other fields are refused unless they have their
default: files of earlier versions state all fields.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from tokamake import plugins
from tokamake.config.families import (
    FAMILIES,
    SEVERAL_STACKS,
    default_setting,
    family_settings,
    objectives,
    stacks,
    wrapped_family,
)
from tokamake.config.fields import Settings, plug_in
from tokamake.config.latent_attention import check_latent_attention, latent_head_dim
from tokamake.config.layer_intervals import is_nth
from tokamake.config.mixture_of_experts import check_experts
from tokamake.config.retrieval_layers import check_retrieval_layers, retrieval_layers
from tokamake.config.rope_scaling import Positive, RopeScaling, check_rotary_positions
from tokamake.config_files import unknown_key
from tokamake.errors import divisor

_FOLLOW = ("head_dim", "intermediate_size", "num_key_value_heads")
"""Fields that follow from other fields if they are empty."""


class Architecture(Settings):
    """Shape of a model, in Hugging Face's terms.

    The defaults here hold for a family unless its `SETTINGS` has another one. A family may have
    settings of its own: names in its `SETTINGS` that are no field here. Their
    values are attributes, too; see `setting`.
    """

    # Keys that are no fields are checked against SETTINGS of the family, see _fill_in.
    model_config = ConfigDict(extra="allow")

    family: Annotated[str, plug_in(FAMILIES)] = "llama"
    """Name of a folder in lib/tokamake/models."""
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Rows of the embedding; empty: the tokenizer's vocabulary size."""
    hidden_size: Annotated[int, Field(ge=1)]
    """Width of the residual stream."""
    intermediate_size: Annotated[int, Field(ge=1)]
    """Width inside the MLP; empty: by the rule INTERMEDIATE_SIZE of the family, if it has one."""
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)]
    """Transformer layers."""
    num_attention_heads: Annotated[int, Field(ge=1)]
    """Query heads."""
    num_key_value_heads: Annotated[int, Field(ge=1)]
    """Key and value heads: 1 for MQA; empty: as many as query heads (MHA)."""
    head_dim: Annotated[int, Field(ge=1)] = None  # type: ignore[assignment]  # see _whole_heads
    """Width of an attention head; empty: hidden_size / num_attention_heads."""
    max_position_embeddings: Annotated[int, Field(ge=1)] = 2048
    """Longest sequence the model is meant for."""
    position_embedding: Literal["rotary", "learned", "alibi", "relative"] = "rotary"
    """Position encoding: rotary, learned, ALiBi, or learned biases of relative positions."""
    rope_theta: Positive = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    """Rotary positions for longer sequences; empty: no stretch."""
    hidden_act: str = "silu"
    """Activation of the MLP, as Hugging Face names it; each family has some of them. silu gates.
    gelu is exact; gelu_new and gelu_pytorch_tanh are its approximation by tanh."""
    attention_bias: bool = False
    """Biases of attention's projections."""
    mlp_bias: bool = False
    """Biases of the MLP's projections."""
    rms_norm_eps: Positive = 1e-5
    """Added to the mean square in RMSNorm."""
    layer_norm_epsilon: Positive = 1e-5
    """Added to the variance in LayerNorm."""
    embedding_layernorm: bool = False
    """Norm the embeddings of tokens."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output layer."""
    initializer_range: Positive = 0.02
    """Standard deviation of random weights."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Add the family's defaults; refuse keys that neither it nor any family has."""
        family = values.get("family", "llama") if isinstance(values, dict) else None
        if family not in plugins.names(FAMILIES):
            return values  # the check of the field names the choices
        settings = family_settings(family, values)
        known = [*cls.model_fields, *(name for name in settings if name not in cls.model_fields)]
        if unknown := [name for name in values if name not in known]:
            raise ValueError(unknown_key(unknown[0], known))
        stated = {
            name: value
            for name, value in values.items()
            if value is not None or name not in _FOLLOW
        }
        hidden = stated.get("hidden_size")
        rule: tuple[int, ...] = plugins.constant(
            FAMILIES, wrapped_family(family, values) or family, "INTERMEDIATE_SIZE", default=()
        )
        if rule and isinstance(hidden, int):
            factor, divisor, multiple = rule
            width = -(-(hidden * factor // divisor) // multiple) * multiple
            stated.setdefault("intermediate_size", width)
        if "num_attention_heads" in stated:
            stated.setdefault("num_key_value_heads", stated["num_attention_heads"])
        filled = {name: default_setting(choices) for name, choices in settings.items()} | stated
        if "qk_nope_head_dim" in filled:
            filled.setdefault("head_dim", latent_head_dim(filled))
        return filled

    @model_validator(mode="after")
    def _whole_heads(self) -> "Architecture":
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.head_dim is None:
            if hidden % heads:
                below = hidden // heads * heads
                near = " or ".join(str(n) for n in (below, below + heads) if n)
                raise ValueError(
                    f"hidden_size: {hidden}: not a multiple of num_attention_heads {heads}; give "
                    f"{near}, another number of heads, or head_dim"
                )
            self.__dict__["head_dim"] = hidden // heads  # fields are frozen only once validated
        if heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: {heads}: not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}; give num_key_value_heads {divisor(heads)}"
            )
        return self

    @model_validator(mode="after")
    def _as_deep_as_the_encoder(self) -> "Architecture":
        number = self._optional("num_decoder_layers", None)
        if isinstance(number, int) and number < 0:
            raise ValueError(f"num_decoder_layers: {number}: too small; give 1 or more")
        if number == 0 and self.model_extra:
            self.model_extra["num_decoder_layers"] = self.num_hidden_layers
        return self

    @model_validator(mode="after")
    def _known_to_family(self) -> "Architecture":
        settings = family_settings(self.family, self.model_extra or {})
        for name, choices in settings.items():
            value = getattr(self, name)
            if isinstance(choices, tuple) and value not in choices:
                listed = " or ".join(map(str, choices))
                raise ValueError(f"{name}: {value!r}: {self.family} has {listed} only")
            default = default_setting(choices)
            is_own = name in (self.model_extra or {}) and default is not None
            if is_own and type(value) is not type(default):
                kind = type(default).__name__
                raise ValueError(f"{name}: {value!r}: needs a value of type {kind}")
        for name, field in type(self).model_fields.items():
            is_default = (value := getattr(self, name)) == field.default
            if name not in settings and name not in _OF_ALL_FAMILIES and not is_default:
                raise ValueError(f"{name}: {value!r}: {self.family} does not know it; remove it")
        return self

    @model_validator(mode="after")
    def _fitting_parts(self) -> "Architecture":
        own = self.model_extra or {}
        if self.has_neighbors:
            check_retrieval_layers(own, self.num_hidden_layers)
        if self.has_routers:
            check_experts(own, num_layers=self.num_hidden_layers)
        if "kv_lora_rank" in own:
            check_latent_attention(own, self)
        return self

    @model_validator(mode="after")
    def _positions(self) -> "Architecture":
        if self.position_embedding == "rotary":
            share = self._optional("partial_rotary_factor", 1.0)
            check_rotary_positions(
                self.rope_scaling, head_dim=self.head_dim, share=share, width=self.rotary_width
            )
        elif self.rope_theta != 10000.0 or self.rope_scaling is not None:
            raise ValueError(
                "rope_theta and rope_scaling belong to position_embedding rotary, not "
                f"{self.position_embedding}; remove them"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_default_head_dim(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Digests of runs from before there was this field must stay.
        values: dict[str, Any] = handler(self)
        if self.has_default_head_dim:
            values.pop("head_dim", None)
        return values

    @property
    def has_default_head_dim(self) -> bool:
        return self.query_size == self.hidden_size

    @property
    def num_layers(self) -> int:
        """Layers of all stacks."""
        if self._optional("shared_towers", None) is False:
            return 2 * self.num_hidden_layers
        further = sum(self._optional(f"num_{each}_layers", 0) for each in ("decoder", "encoder"))
        return self.num_hidden_layers + self.num_mtp_layers + further

    @property
    def num_mtp_layers(self) -> int:
        """Layers after the last one that predict further tokens (MTP), in training alone."""
        return int(self._optional("num_nextn_predict_layers", 0))

    @property
    def mtp_layers(self) -> range:
        """Indices of these layers."""
        number = self.num_hidden_layers
        return range(number, number + self.num_mtp_layers)

    @property
    def without_mtp(self) -> "Architecture":
        """The model that predicts the next token alone."""
        if not self.num_mtp_layers:
            return self
        return self.model_copy(update={"num_nextn_predict_layers": 0})

    @property
    def retrieval_layers(self) -> range:
        """Indices of the layers of a `retro` that attend to neighbors."""
        return retrieval_layers(self.model_extra or {}, self.num_hidden_layers)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def rotary_width(self) -> int:
        """Numbers of each head that rotary positions turn; the rest has none."""
        whole = int(self.head_dim * self._optional("partial_rotary_factor", 1.0))
        return int(self._optional("qk_rope_head_dim", whole))

    def rotates(self, layer: int) -> bool:
        """Whether a layer, from 0 on, rotates heads: NoPE layers do not (arXiv 2501.18795)."""
        return not is_nth(layer, self._optional("no_rope_layer_interval", 0))

    def window(self, layer: int) -> int | None:
        """Tokens that a token sees in a layer, itself included; None: all earlier ones."""
        if is_nth(layer, self._optional("full_attention_interval", 0)):
            return None
        return self._optional("sliding_window", 0) or None

    @property
    def local_rope_theta(self) -> float:
        """Base of rotary positions in layers with a window, which no scaling stretches; 0: all
        layers rotate alike."""
        return float(self._optional("local_rope_theta", 0.0))

    @property
    def attention_softcap(self) -> float:
        """c of c · tanh(score / c), which caps scores of attention; 0: there is no cap."""
        return float(self._optional("attn_logit_softcapping", 0.0))

    @property
    def logit_softcap(self) -> float:
        """The same for the logits of the vocabulary."""
        return float(self._optional("final_logit_softcapping", 0.0))

    @property
    def attention_sinks(self) -> bool:
        """Whether each head has a further score, which takes weight from the tokens."""
        return bool(self._optional("attention_sinks", False))

    @property
    def needs_scores(self) -> bool:
        """Whether scores of attention are capped or have sinks, which no kernel of torch knows."""
        return bool(self.attention_softcap) or self.attention_sinks

    @property
    def query_scale(self) -> float:
        """Factor of queries, beside 1 / √head_dim, which all attention has."""
        return (self.head_dim / self._optional("query_pre_attn_scalar", self.head_dim)) ** 0.5

    @property
    def latent_size(self) -> int:
        """Width of what a cache keeps of a token with latent attention; 0: layers have none."""
        latent = int(self._optional("kv_lora_rank", 0))
        return latent + self.rotary_width if latent else 0

    @property
    def value_size(self) -> int:
        """Width of the values of all query heads together."""
        return self.num_attention_heads * int(self._optional("v_head_dim", self.head_dim))

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def has_position_bias(self) -> bool:
        """Whether positions enter as a bias of attention, for each head and pair of tokens."""
        return self.position_embedding in ("alibi", "relative")

    @property
    def objectives(self) -> tuple[str, ...]:
        return objectives(self.family)

    @property
    def is_causal(self) -> bool:
        """Whether the family predicts the next token, as text is generated; encoders do not."""
        return stacks(self.family) in ("decoder", "retro")

    @property
    def has_decoder(self) -> bool:
        """Whether the family has two stacks of layers: an encoder, and a decoder that sees it."""
        return stacks(self.family) == "encoder_decoder"

    @property
    def has_towers(self) -> bool:
        """Whether the family embeds two kinds of texts, queries and blocks; it has no logits."""
        return stacks(self.family) == "biencoder"

    @property
    def has_neighbors(self) -> bool:
        """Whether the family's decoder attends to neighbors, which an encoder reads."""
        return stacks(self.family) == "retro"

    @property
    def several_stacks(self) -> str:
        """Stacks of layers in words, if there are several, which pipelines do not divide."""
        return SEVERAL_STACKS.get(stacks(self.family), "")

    @property
    def has_routers(self) -> bool:
        """Whether the MLPs of the family's layers are mixtures of experts."""
        return bool(plugins.constant(FAMILIES, self.family, "HAS_ROUTERS", default=False))

    @property
    def has_router_biases(self) -> bool:
        """Whether the family's routers have biases that balance the experts."""
        return bool(plugins.constant(FAMILIES, self.family, "HAS_ROUTER_BIASES", default=False))

    @property
    def expert_size(self) -> int:
        """Width inside an expert, or inside the MLP of a family without experts."""
        return int(self._optional("moe_intermediate_size", self.intermediate_size))

    @property
    def used_mlp_size(self) -> int:
        """Width inside the MLP, or inside all experts that a token uses."""
        shared = int(self._optional("n_shared_experts", 0))
        return self.expert_size * (shared + int(self._optional("num_experts_per_tok", 1)))

    @property
    def expert_layers(self) -> range:
        """Indices of the layers with mixtures of experts; the layers before them are dense."""
        first = int(self._optional("first_k_dense_replace", 0))
        return range(first, self.mtp_layers.stop) if self.has_routers else range(0)

    @property
    def position_fields(self) -> tuple[str, ...]:
        """Fields about positions that a trained model may change: no weight depends on them."""
        if self.position_embedding != "rotary":
            return ()
        return ("rope_theta", "rope_scaling", "max_position_embeddings")

    def with_positions_of(self, other: "Architecture") -> "Architecture":
        changed = {name: getattr(other, name) for name in self.position_fields}
        return self.model_copy(update=changed)

    @property
    def has_sample_head(self) -> bool:
        """Whether the model predicts classes of samples: the order of sentences, or of a task."""
        has_order = bool(self._optional("sentence_order_head", False))
        return has_order or self._optional("task_head", "none") != "none"

    def setting(self, name: str) -> Any:
        """Value of a setting that this family alone has."""
        return (self.model_extra or {})[name]

    def _optional(self, name: str, default: Any) -> Any:
        """Value of a setting that several families have; `default` of those without it."""
        return (self.model_extra or {}).get(name, default)


_OF_ALL_FAMILIES = {
    *("family", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    "initializer_range",
}
"""Fields that no family lists in its SETTINGS."""
