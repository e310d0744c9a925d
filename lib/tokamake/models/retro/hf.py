"""How a `retro` is stored: tensors of its decoder, of cross-attention, and of its encoder.

transformers has no such model type. Folders of Hugging Face's format have our tensors and fields.
"""

import re

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.retrieval_layers import RETRIEVAL_SETTINGS
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import HFFormat, same_keys

_OWN = (
    *("decoder", *RETRIEVAL_SETTINGS, "final_norm"),
    *("encoder_hidden_dropout", "encoder_attention_dropout"),
)
_OTHERWISE = {"family", "position_embedding", "rope_theta", "rope_scaling"}
"""Fields that the model type, or keys of rotary positions, state."""

HUGGING_FACE = tuple(
    HFFormat(
        model_type=f"retro-{position}",
        class_name="RetroForCausalLM",
        keys=same_keys(
            *(name for name in Architecture.model_fields if name not in _OTHERWISE), *_OWN
        ),
        implied={"position_embedding": position},
    )
    for position in ("rotary", "learned", "alibi")
)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_ATTENTION = re.compile("^(input(?=_layernorm)|self_attn)")


def decoder_of(architecture: Architecture) -> Architecture:
    """The decoder as a model of its own family, without neighbors."""
    family = architecture.setting("decoder")
    own = architecture.model_extra or {}
    values = {name: value for name, value in architecture.model_dump().items() if name not in own}
    return Architecture.model_validate({**values, "family": family})


def shapes(architecture: Architecture) -> tensor_shapes.Shapes:
    """Shape of every tensor by its name."""
    decoder = decoder_of(architecture)
    of_decoder = plugins.load("models/*/hf", decoder.family).shapes(decoder)
    by_layer: dict[int, tensor_shapes.Shapes] = {}
    others: tensor_shapes.Shapes = {}
    for name, shape in of_decoder.items():
        if match := _LAYER.fullmatch(name):
            by_layer.setdefault(int(match[1]), {})[match[2]] = shape
        elif architecture.setting("final_norm") or not name.startswith("model.norm."):
            others[name] = shape
    first, *_ = retrieving = architecture.retrieval_layers
    for number in retrieving:
        further = _cross_attention(by_layer[number])
        if number == first:
            further |= _encoder(by_layer[number], architecture.setting("num_encoder_layers"))
        by_layer[number] |= further
    return {
        f"model.layers.{number}.{name}": shape
        for number, layer in by_layer.items()
        for name, shape in layer.items()
    } | others


def _cross_attention(layer: tensor_shapes.Shapes) -> tensor_shapes.Shapes:
    """Tensors of the cross-attention of a layer, whose self-attention has the same shapes."""
    return {
        _ATTENTION.sub("cross_attn", name): shape
        for name, shape in layer.items()
        if _ATTENTION.match(name)
    }


def _encoder(layer: tensor_shapes.Shapes, num_layers: int) -> tensor_shapes.Shapes:
    """Tensors of the encoder, whose layers have the shapes of the decoder's."""
    attention = {name: shape for name, shape in layer.items() if _ATTENTION.match(name)}
    rest = {name: shape for name, shape in layer.items() if name not in attention}
    first = attention | _cross_attention(layer) | rest
    return {
        f"encoder.layers.{number}.{name}": shape
        for number in range(num_layers)
        for name, shape in (layer if number else first).items()
    }
