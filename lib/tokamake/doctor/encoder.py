"""Check of a tokenizer's encoder: which one encodes, and how fast."""

import time
from pathlib import Path

from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.errors import UserError

_CHARACTERS = 3_000_000
"""Text that is encoded first: enough for the fast encoder to be loaded."""


def check_encoder(tokenizer: Path) -> list[Result]:
    """Encode the sources of this package on one thread."""
    import tokamake
    from tokamake.data.tokenize.encoder import Encoder, Mismatch
    from tokamake.data.tokenizers import failure, open_tokenizer

    name = f"encoder of {tokenizer}"
    sources = sorted(Path(tokamake.__file__).parent.rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in sources]
    # Reversed text loads the encoder, but does not fill its cache with the words of the sources.
    others = [text[::-1] for text in texts]
    others *= 1 + _CHARACTERS // sum(map(len, texts))
    try:
        opened = open_tokenizer(tokenizer)
        encoder = Encoder(opened, workers=1)
        encoder(others)
        started = time.perf_counter()
        encoder(texts)
        seconds = time.perf_counter() - started
    except UserError as error:
        return [wrong(name, str(error), "give another tokenizer, or report this one")]
    except Mismatch as error:
        return [warning(name, str(error), f"`tokenize` falls back to {opened.package}, slower")]
    except BaseException as error:  # the tokenizer's package panics
        return [wrong(name, failure(error), "give another tokenizer, or report this one")]
    speed = sum(len(text.encode()) for text in texts) / 1e6 / seconds
    value = f"{encoder.name}, {speed:,.0f} MB/s of Python code on one thread"
    if not encoder.fallback_reason:
        return [ok(name, value)]
    remedy = f"not the fast encoder: {encoder.fallback_reason}; more workers encode faster"
    return [warning(name, value, remedy)]
