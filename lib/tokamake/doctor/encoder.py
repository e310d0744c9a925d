"""Check of a tokenizer's encoder: which one encodes, and how fast."""

import time
from pathlib import Path

from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.errors import UserError

_CHARACTERS = 3_000_000
"""Text that is encoded: enough for the fast encoder to be used."""


def check_encoder(tokenizer: Path) -> list[Result]:
    """Encode the sources of this package on one thread."""
    import tokamake
    from tokamake.data.tokenize.encoder import Encoder, Mismatch
    from tokamake.data.tokenizers import open_tokenizer

    name = f"encoder of {tokenizer}"
    texts, size = [], 0
    sources = sorted(Path(tokamake.__file__).parent.rglob("*.py"))
    while size < _CHARACTERS:
        texts += [path.read_text(encoding="utf-8") for path in sources]
        size = sum(map(len, texts))
    try:
        encoder = Encoder(open_tokenizer(tokenizer), workers=1)
        encoder(texts)  # loads it
        started = time.perf_counter()
        encoder(texts)
    except (UserError, Mismatch) as error:
        return [wrong(name, str(error), "give another tokenizer, or report this one")]
    speed = size / 1e6 / (time.perf_counter() - started)
    value = f"{encoder.name}, {speed:,.0f} MB/s of Python code on one thread"
    if not encoder.fallback_reason:
        return [ok(name, value)]
    remedy = f"not the fast encoder: {encoder.fallback_reason}; more workers encode faster"
    return [warning(name, value, remedy)]
