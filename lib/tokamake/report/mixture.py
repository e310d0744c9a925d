"""Sums of corpora for figures and tables; frames have the columns of `results.mixtures`."""

import pandas as pd

from tokamake.results.corpora import MIXTURE, sums
from tokamake.results.frames import frame


def total(corpora: pd.DataFrame) -> pd.DataFrame:
    """Sum of corpora in one row. Its epochs are consumed tokens divided by training tokens."""
    trained_tokens = corpora["trained_tokens"].sum()
    consumed_tokens = sum(corpora["epochs"] * corpora["trained_tokens"])
    row = {
        **{"corpus": "all", **sums(corpora.to_dict("records"))},
        "epochs": consumed_tokens / trained_tokens if trained_tokens else 0.0,
    }
    added = ("datasets", "trained_tokens", "share_of_tokens", "share_of_samples")
    return frame([row | {name: sum(corpora[name]) for name in added}], MIXTURE)


def largest(corpora: pd.DataFrame, max_rows: int) -> pd.DataFrame:
    """Return all corpora, or the largest and the sum of the others, in at most `max_rows` rows."""
    if len(corpora) <= max_rows:
        return corpora
    ordered = corpora.sort_values(["share_of_samples", "corpus"], ascending=[False, True])
    small = ordered[max_rows - 1 :]
    others = total(small).assign(corpus=f"{len(small)} others")
    return pd.concat([ordered[: max_rows - 1], others], ignore_index=True)
