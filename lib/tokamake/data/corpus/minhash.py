"""MinHash band keys of texts, to find near-duplicates (Broder 1997; LSH by bands).

`data/filters/_words.py` defines the words.
"""

from tokamake import _csrc
from tokamake.config.near_duplicates import MinHashSettings
from tokamake.data.filters._words import word_characters

_SEED = 0x746F6B616D616B65


def make_minhash(settings: MinHashSettings) -> _csrc.MinHash:
    """Make the object that computes the keys of texts."""
    return _csrc.MinHash(
        word_characters(),
        of_characters=settings.unit == "characters",
        shingle=settings.shingle,
        bands=settings.bands,
        rows=settings.rows,
        seed=_SEED,
    )
