"""Settings by which near-duplicates are found: MinHash signatures in bands."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tokamake.config.fields import Settings

PRESETS: dict[str, dict[str, Any]] = {
    "fineweb": {},
    "slimpajama": {"bands": 9, "rows": 13, "shingle": 13, "unit": "characters"},
    "redpajama-0.7": {"bands": 14, "rows": 9, "shingle": 13},
    "redpajama-0.8": {"bands": 9, "rows": 13, "shingle": 13},
    "redpajama-0.9": {"bands": 5, "rows": 25, "shingle": 13},
}
"""Settings by the corpus that was made with them: FineWeb (arXiv 2406.17557), SlimPajama (Cerebras,
2023), RedPajama-V2 for three similarities (arXiv 2411.12372)."""

Size = Annotated[int, Field(ge=1, le=1024)]


class MinHashSettings(Settings):
    """Band keys of documents: two documents with Jaccard similarity J of their shingles share one
    with probability 1 - (1 - J^rows)^bands."""

    bands: Size = 14
    """Keys of a document. Documents that share one are near-duplicates."""
    rows: Size = 8
    """MinHashes in a band."""
    shingle: Size = 5
    """Consecutive words, or characters, of a shingle."""
    unit: Literal["words", "characters"] = "words"
    """Unit of shingles. Words are letters, marks and digits in lower case; characters are words
    with single spaces between them."""

    def probability(self, jaccard: float) -> float:
        """Probability that two documents of this Jaccard similarity share a band key."""
        return float(1 - (1 - jaccard**self.rows) ** self.bands)


class NearDuplicateSettings(MinHashSettings):
    """Documents that are nearly the same as an earlier one; the first document is kept. The
    defaults are FineWeb's, which finds 92 % of the documents of Jaccard similarity 0.8. In place of
    the section, give the name of a preset: fineweb, slimpajama, redpajama-0.7, redpajama-0.8 or
    redpajama-0.9."""

    scope: Literal["data", "corpus"] = "data"
    """data: compare all corpora, in the order of the table. corpus: compare the documents of each
    corpus alone."""
    against: tuple[Path, ...] = ()
    """Files `near_duplicates/*.keys` of other data folders: documents near one of theirs are
    dropped, too. Raw files of that data are not read again."""


def _from_preset(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in PRESETS:
        raise ValueError(f"{value}: unknown preset; choose one of {', '.join(PRESETS)}")
    return PRESETS[value]


NearDuplicates = Annotated[NearDuplicateSettings, BeforeValidator(_from_preset)]
