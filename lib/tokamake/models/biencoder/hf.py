"""How a `biencoder` is stored: its tensors, and a folder with the tensors of a BERT for each tower.

transformers has no such model type. Its MegatronBertModel loads the tensors of a tower.
"""

from dataclasses import replace

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.encoder_format import MEGATRON_BERT, encoder_shapes
from tokamake.models.common.hf_format import same_keys

SEPARATE, SHARED = ("query_model", "context_model"), ("shared_model",)
"""Towers of queries and of blocks, or the one of both, as Megatron names them."""

ENCODER_FAMILY = "bert"
"""Family whose checkpoints can start the towers."""


def towers(architecture: Architecture) -> tuple[str, ...]:
    """Names of the towers of a model."""
    return SHARED if architecture.setting("shared_towers") else SEPARATE


def vector_width(architecture: Architecture) -> int:
    """Width of the vectors of texts."""
    return int(architecture.setting("projection_dim") or architecture.hidden_size)


def shapes(architecture: Architecture) -> tensor_shapes.Shapes:
    """Shape of every tensor by its name."""
    tower = encoder_shapes(architecture)
    if size := architecture.setting("projection_dim"):
        shape = (size, architecture.hidden_size)
        tower |= tensor_shapes.with_bias("model.projection", shape, has_bias=True)
    return {
        f"model.{name}.{tensor.removeprefix('model.')}": shape
        for name in towers(architecture)
        for tensor, shape in tower.items()
    }


_MODULES = {
    **{ours: theirs for ours, theirs in MEGATRON_BERT.names.items() if ours.startswith("embed_")},
    "norm": MEGATRON_BERT.names["norm"],
    "projection": "projection_enc",
}
"""Names of modules of a tower outside its layers."""

_OWN = {"shared_towers": False, "projection_dim": 0}

HUGGING_FACE = (
    replace(
        MEGATRON_BERT,
        model_type="megatron-bert-biencoder",
        class_name="MegatronBertBiencoder",
        keys={**MEGATRON_BERT.keys, **same_keys(*_OWN)},
        defaults={**MEGATRON_BERT.defaults, **_OWN},
        names={
            **MEGATRON_BERT.names,
            **{
                f"{tower}.{ours}": f"{tower}.{theirs}"
                for tower in (*SEPARATE, *SHARED)
                for ours, theirs in _MODULES.items()
            },
        },
    ),
)
