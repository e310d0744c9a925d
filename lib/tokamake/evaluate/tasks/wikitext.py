"""Word-level perplexity of WikiText-2 and WikiText-103, as Megatron-LM computes it.

The text of all files is one stream. The loss is per token; the adjusted perplexity is per word of
the original text, whose tokens (words, punctuation) have spaces between them.
"""

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from tokamake.data.corpus.raw_files import expand
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.tasks import TaskSettings
    from tokamake.evaluate.scorer import Scorer

NEEDS_DATA = True
SETTINGS = {
    "stride": {
        "default": 32,
        "ge": 1,
        "description": "Tokens that each window predicts. Fewer: more context, more time.",
    }
}
_MAX_LOSS = 20.0
"""Megatron's bound of the loss in exp()."""

_REPLACEMENTS: tuple[tuple[str, str], ...] = (
    # Marks within words and numbers.
    (r"s '", "s'"),
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    # Punctuation, one mark after the other: marks that follow each other share a space.
    *((rf" \{mark} ", f"{mark} ") for mark in ":;.!?,"),
    # Brackets and quotation marks.
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    # Headings and signs.
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (r" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)


def detokenize(text: str) -> str:
    """Undo WikiText's tokenization into words and punctuation."""
    for pattern, replacement in _REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    return text


def evaluate(scorer: "Scorer", settings: "TaskSettings") -> dict[str, Any]:
    """Score the text of the files.

    Returns:
        tokens, words; loss per token; perplexity per token; adjusted_perplexity per word.

    Raises:
        UserError: a file is missing, or there is no text.
    """
    paths = expand(settings.data)
    try:
        text = "".join(path.read_text(encoding="utf-8") for path in paths)
    except UnicodeDecodeError:
        raise UserError(f"{', '.join(map(str, paths))}: not UTF-8; name text files") from None
    tokens = np.array(scorer.encode(detokenize(text)), dtype=np.int64)
    words = len(text.strip().split(" "))
    if len(tokens) < 2 or words < 2:
        raise UserError(f"{', '.join(map(str, paths))}: less than two words; name other files")
    nats = scorer.nats(tokens, stride=settings.own["stride"], label="wikitext")
    loss = nats / (len(tokens) - 1)
    ratio = (len(tokens) - 1) / (words - 1)
    return {
        "tokens": len(tokens),
        "words": words,
        "loss": loss,
        "perplexity": math.exp(min(_MAX_LOSS, loss)),
        "adjusted_perplexity": math.exp(min(_MAX_LOSS, loss * ratio)),
    }
