"""Settings of `index` that decide the samples of a split."""

from typing import Any, NamedTuple

from tokamake.config.objective import DEFAULT
from tokamake.data.samples.draw import Blend, Within
from tokamake.data.samples.sentence_masking import KEY


class IndexSettings(NamedTuple):
    """Settings that decide the samples of a split; most fields are options of `index`."""

    sequence_length: int
    seed: int
    blend: Blend
    within_corpus: Within
    separate_last_epoch: bool | None
    drop_last_partial_sequence: bool
    objective: dict[str, Any] | None = None
    """Entry of index.json; None: there is none, as for the default objective."""

    @property
    def objective_name(self) -> str:
        return self.objective["name"] if self.objective else DEFAULT

    def of(self, name: str) -> "IndexSettings":
        """Settings of one split: training only takes whole samples."""
        return self._replace(drop_last_partial_sequence=True) if name == "train" else self

    def options(self) -> dict[str, Any]:
        """Settings as index.json states them."""
        options = self._asdict()
        objective = options.pop("objective")
        return options | ({KEY: objective} if objective else {})
