"""Loss, perplexity and bits per byte of any text."""

from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.tasks import TaskSettings
    from tokamake.evaluate.scorer import Scorer

NEEDS_DATA = True
SETTINGS = {
    "text_key": {"default": "text", "description": "Key or column that holds the text."},
    "max_tokens": {"default": 0, "ge": 0, "description": "Maximum tokens of each file; 0: all."},
}


def evaluate(scorer: "Scorer", settings: "TaskSettings") -> dict[str, Any]:
    """Score the documents of raw files, joined as for training.

    Returns:
        documents, tokens, bytes; loss per token; perplexity; bits_per_byte.

    Raises:
        UserError: a file is missing or damaged, or holds no text.
    """
    import sys

    from tokamake.evaluate.perplexity import measures, read_raw, text_bytes

    files = read_raw(
        settings.data,
        text_key=(settings.own["text_key"],),
        max_tokens=settings.own["max_tokens"] or sys.maxsize,
        tokenizer=scorer.tokenizer,
    )
    counts = {"documents": 0, "tokens": 0, "bytes": 0}
    nats = 0.0
    for path, held_out in files.items():
        nats += scorer.nats(held_out.tokens, stride=scorer.sequence_length, label=path)
        counts["documents"] += len(held_out.lengths)
        counts["tokens"] += len(held_out.tokens) - 1
        counts["bytes"] += text_bytes(held_out, scorer.tokenizer)
    if not counts["tokens"]:
        raise UserError(
            f"{', '.join(settings.data)}: only one token, so nothing is predicted; name other files"
        )
    return measures("text", **counts, nats=nats)
