"""Arguments of checkpoints without any, from the shapes of their tensors.

Megatron's first versions stored no arguments: NVIDIA's BERT and GPT-2 of 345 million parameters
are such checkpoints.
"""

import logging
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from tokamake.errors import UserError

_log = logging.getLogger(__name__)

_HEAD_DIM = 64
"""Width of the attention heads of all models that were published without arguments."""
_EMBEDDING = "language_model.embedding"
_LAYER = re.compile(r"language_model\.encoder\.layers\.(\d+)\.")
_NEEDED = (
    f"{_EMBEDDING}.word_embeddings.weight",
    f"{_EMBEDDING}.position_embeddings.weight",
    "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight",
)


def arguments_from_shapes(
    shapes: Mapping[str, tuple[int, ...]], file: Path, *, tensor_parallel_size: int
) -> Namespace:
    """Derive the arguments of a model from shapes on the first rank; warn of unknown ones."""
    missing = [name for name in _NEEDED if name not in shapes]
    words, positions, mlp = (shapes.get(name, (0, 0)) for name in _NEEDED)
    hidden_size = words[1]
    if missing or hidden_size % _HEAD_DIM:
        size = f"a hidden size of {hidden_size}, no multiple of {_HEAD_DIM}"
        reason = f"no {missing[0]}" if missing else size
        raise UserError(
            f"{file}: has no args, and {reason}: it is none of the models that Megatron wrote "
            "without args; give a checkpoint with them"
        )
    num_heads = hidden_size // _HEAD_DIM
    _log.warning(
        "%s: has no args: assuming %d attention heads of width %d, and a GELU by tanh in MLPs",
        *(file, num_heads, _HEAD_DIM),
    )
    return Namespace(
        num_layers=len({match[1] for name in shapes if (match := _LAYER.match(name))}),
        hidden_size=hidden_size,
        ffn_hidden_size=mlp[0] * tensor_parallel_size,
        num_attention_heads=num_heads,
        max_position_embeddings=positions[0],
        bert_binary_head="binary_head.weight" in shapes,
    )
