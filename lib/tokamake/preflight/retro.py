"""The model that embeds the chunks of objective retro, before any job runs."""

from importlib.util import find_spec
from pathlib import Path

from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.load_model import tokenizer_of
from tokamake.data.samples.sentence_masking import special_tokens
from tokamake.errors import UserError, naming

FAMILIES = ("bert", "biencoder")
"""Families that embed chunks."""


def check_embedder(path: Path | None, tokenizer: Path | None, *, where: str) -> None:
    """Refuse a path that is no BERT and no biencoder, and a tokenizer that does not fit it.

    Args:
        tokenizer: of the model; None: the one beside its weights, or of the run that trained it.
        where: section of both settings, for messages.
    """
    with naming(f"{where}.embedder"):
        if path is None:
            raise UserError("empty; name a BERT or a biencoder, in any format")
        checkpoint = open_any(path)
        if (family := checkpoint.architecture.family) not in FAMILIES:
            raise UserError(
                f"{path}: a model of family {family}; name a BERT, or a biencoder, which objective "
                "ict trains"
            )
    with naming(f"{where}.embedder_tokenizer"):
        opened = tokenizer_of(checkpoint, tokenizer, option="this setting")
        special_tokens(opened, ("cls", "sep"), path=tokenizer or path)


def check_faiss() -> None:
    """Refuse an index without FAISS."""
    if find_spec("faiss") is None:
        raise UserError(
            "train.objective: retro: needs faiss, which this Python environment lacks; run `pip "
            "install 'tokamake[retrieval]'`"
        )
