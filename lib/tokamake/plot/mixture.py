"""What the corpora hold and how much of each the run drew, corpus by corpus.

Counts come from `describe`'s metadata, shares from the weighting file, sizes from the resolved run;
rows go to `figures` and `tables`.
"""

from pathlib import Path
from typing import NamedTuple

from tokamake import files
from tokamake.config import Run
from tokamake.data.mixture.weights import read_weights
from tokamake.data.pairs import statistics
from tokamake.data.pairs.statistics import Bin
from tokamake.data.text import splits
from tokamake.errors import UserError

_FATES = ("documents_in", "empty_documents", "duplicate_documents", "quarantined_documents")


class Corpus(NamedTuple):
    """One corpus of the run, or the total of all."""

    name: str
    files: int
    """Merged files."""
    documents: int
    tokens: int
    text_bytes: int
    """Bytes of the raw text, in UTF-8."""
    share_of_tokens: float
    """Of all tokens there are, 0 to 1."""
    share_of_samples: float
    """Of the samples the run trains on, 0 to 1."""
    epochs: float
    """Times that the run goes through the training documents."""
    lengths: tuple[Bin, ...] = ()
    """Documents by their length in tokens, the end-of-document token included."""
    documents_in: int | None = None
    """Documents that the raw files hold: those above and the empty, duplicate and quarantined."""
    empty_documents: int | None = None
    """Documents without a token."""
    duplicate_documents: int | None = None
    """Documents left out for an equal one before them."""
    quarantined_documents: int | None = None
    """Documents set aside because they could not be read."""


def read_corpora(*, metadata: Path, weights: Path, run: Run) -> list[Corpus]:
    """Describe all corpora, in the order of the metadata; those not in the mixture have no share.

    Raises:
        UserError: a file is missing or broken.
    """
    entries = read_weights(weights)
    named = {entry.prefix: entry.corpus for entry in entries}
    pairs: dict[str, list[dict]] = {}
    for pair in files.read_json(metadata, "make it with `tokamake describe`"):
        if "lengths" not in pair:
            raise UserError(f"{metadata}: has no lengths; make it again with `tokamake describe`")
        name = named.get(pair["data_prefix"], pair["corpus"])
        pairs.setdefault(name, []).append(pair)
    shares = dict.fromkeys([*pairs, *named.values()], 0.0)
    whole = sum(entry.weight for entry in entries)
    for entry in entries:
        shares[entry.corpus] += entry.weight / whole
    all_tokens = sum(_sum(group, "total_num_tokens") for group in pairs.values())
    return [
        _describe(name, pairs.get(name, []), share=share, all_tokens=all_tokens, run=run)
        for name, share in shares.items()
    ]


def total(corpora: list[Corpus]) -> Corpus:
    """Sum of corpora; its epochs are the tokens drawn over the training tokens there are."""
    share = sum(corpus.share_of_tokens for corpus in corpora)
    epochs = sum(corpus.epochs * corpus.share_of_tokens for corpus in corpora)
    return Corpus(
        name="all",
        files=sum(corpus.files for corpus in corpora),
        documents=sum(corpus.documents for corpus in corpora),
        tokens=sum(corpus.tokens for corpus in corpora),
        text_bytes=sum(corpus.text_bytes for corpus in corpora),
        share_of_tokens=share,
        share_of_samples=sum(corpus.share_of_samples for corpus in corpora),
        epochs=epochs / share if share else 0.0,
        lengths=tuple(statistics.add(corpus.lengths for corpus in corpora)),
        **_counts([corpus._asdict() for corpus in corpora]),
    )


def largest(corpora: list[Corpus], most: int) -> list[Corpus]:
    """All corpora, or with more than `most` the largest and the sum of the others."""
    if len(corpora) <= most:
        return corpora
    ordered = sorted(corpora, key=lambda corpus: (-corpus.share_of_samples, corpus.name))
    rest = ordered[most - 1 :]
    return [*ordered[: most - 1], total(rest)._replace(name=f"{len(rest)} others")]


def _describe(name: str, pairs: list[dict], *, share: float, all_tokens: int, run: Run) -> Corpus:
    tokens = _sum(pairs, "total_num_tokens")
    train = run.train
    drawn = share * train.train_steps * train.global_batch_size * train.sequence_length
    available = tokens * splits.shares(train.split)[0]
    return Corpus(
        name=name,
        files=len(pairs),
        documents=_sum(pairs, "total_num_docs"),
        tokens=tokens,
        text_bytes=_sum(pairs, "text_bytes"),
        share_of_tokens=tokens / all_tokens if all_tokens else 0.0,
        share_of_samples=share,
        epochs=drawn / available if available else 0.0,
        lengths=tuple(statistics.add(pair["lengths"] for pair in pairs)),
        **_counts(pairs),
    )


def _counts(parts: list[dict]) -> dict[str, int | None]:
    """Sums of what became of the raw files' documents; None where it is not told of all parts."""
    sums: dict[str, int | None] = {}
    for key in _FATES:
        told = [part[key] for part in parts if part.get(key) is not None]
        sums[key] = sum(told) if len(told) == len(parts) else None
    return sums


def _sum(pairs: list[dict], key: str) -> int:
    return sum(pair[key] for pair in pairs)
