"""LAMBADA (arXiv 1606.06031): predict the last word of a passage."""

import math
from typing import TYPE_CHECKING, Any

from tokamake.data.corpus.documents import read_texts
from tokamake.data.corpus.raw_files import expand
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.tasks import TaskSettings
    from tokamake.evaluate.scorer import Scorer

NEEDS_DATA = True
SETTINGS = {
    "strict": {
        "default": True,
        "description": "Whether the label is the whole last word; else it is the last token, as by "
        "default in Megatron.",
    },
    "text_key": {"default": "text", "description": "Key or column that holds the passage."},
}


def evaluate(scorer: "Scorer", settings: "TaskSettings") -> dict[str, Any]:
    """Score the passages of the files.

    Returns:
        passages; accuracy, the share of passages whose label is the most likely text; perplexity of
        the labels.

    Raises:
        UserError: a file is missing or damaged, or a passage is a single word.
    """
    is_strict, key = settings.own["strict"], settings.own["text_key"]
    rows = []
    for path in expand(settings.data):
        for number, text in enumerate(read_texts(path, key), 1):
            context, label = _divided(scorer, text, is_strict=is_strict)
            if not context or not label:
                raise UserError(f"{path}: passage {number}: {text[:40]!r}: has no words before it")
            room = scorer.sequence_length + 1 - len(label)
            if room < 1:
                raise UserError(
                    f"{path}: passage {number}: its last word has {len(label)} tokens, but the "
                    f"model reads {scorer.sequence_length}; leave it out"
                )
            rows.append(([*context[-room:], *label], len(label)))
    if not rows:
        raise UserError(f"{', '.join(settings.data)}: no passage; name other files")
    scores = scorer.score(rows, label="lambada")
    loss = -sum(row.log_probability for row in scores) / len(scores)
    return {
        "passages": len(scores),
        "accuracy": sum(row.is_greedy for row in scores) / len(scores),
        "perplexity": math.exp(min(loss, 700.0)),
    }


def _divided(scorer: "Scorer", text: str, *, is_strict: bool) -> tuple[list[int], list[int]]:
    """Tokens of the context and of the label."""
    if not is_strict:
        tokens = scorer.encode(text)
        return tokens[:-1], tokens[-1:]
    text = text.rstrip()
    word = text.rsplit(None, 1)[-1] if text else ""
    context = text[: len(text) - len(word)].strip()
    # Not the tokens of " word": SentencePiece begins a text with a space of its own.
    before, whole = scorer.encode(context), scorer.encode(f"{context} {word}")
    return before, whole[len(before) :]
