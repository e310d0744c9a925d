"""The model that embeds the chunks of objective retro, before any job runs."""

from importlib.util import find_spec
from pathlib import Path

from tokamake.checkpoint.detect import open_any
from tokamake.errors import UserError

FAMILIES = ("bert", "biencoder")
"""Families that embed chunks."""


def check_embedder(path: Path | None) -> None:
    """Refuse a path that is no BERT and no biencoder."""
    if path is None:
        raise UserError("empty; name a BERT or a biencoder, in any format")
    if (family := open_any(path).architecture.family) not in FAMILIES:
        raise UserError(
            f"{path}: a model of family {family}; name a BERT, or a biencoder, which objective ict "
            "trains"
        )


def check_faiss() -> None:
    """Refuse an index without FAISS."""
    if find_spec("faiss") is None:
        raise UserError(
            "train.objective: retro: needs faiss, which this Python environment lacks; run `pip "
            "install 'tokamake[retrieval]'`"
        )
