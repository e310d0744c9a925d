"""What the corpora hold and how much of each the run drew, corpus by corpus.

Counts come from `describe`'s metadata, shares from the index, sizes from the resolved run; rows go
to `figures` and `tables`.
"""

from pathlib import Path
from typing import NamedTuple

from tokamake import files
from tokamake.config.resolved_run import Run
from tokamake.data.indexed import length_histogram
from tokamake.data.indexed.length_histogram import Bin
from tokamake.data.samples.index_folder import read_index
from tokamake.errors import UserError

_FATES = ("documents_in", "empty_documents", "duplicate_documents", "quarantined_documents")


class Component(NamedTuple):
    """One corpus of the mixture, or the total of several."""

    name: str
    files: int
    """Merged files."""
    documents: int
    tokens: int
    text_bytes: int | None
    """Bytes of the raw text, in UTF-8; None: not known of all files."""
    share_of_tokens: float
    """Of all tokens that train, 0 to 1."""
    share_of_samples: float
    """Of the samples the run trains on, 0 to 1."""
    epochs: float
    """Times that the run goes through the training documents."""
    trained_tokens: int
    """Tokens of these documents."""
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


def read_mixture(*, metadata: Path, index: Path, run: Run) -> list[Component]:
    """Read all corpora, in the order of the metadata; those that do not train have no share.

    Raises:
        UserError: a file is missing or broken.
    """
    drawn = read_index(index)["splits"]["train"]["files"]
    named = {file["prefix"]: file["corpus"] for file in drawn}
    pairs: dict[str, list[dict]] = {}
    for pair in files.read_json(metadata, "make it with `tokamake describe`"):
        if "lengths" not in pair:
            raise UserError(f"{metadata}: has no lengths; make it again with `tokamake describe`")
        name = named.get(pair["data_prefix"], pair["corpus"])
        pairs.setdefault(name, []).append(pair)
    samples, tokens = (dict.fromkeys([*pairs, *named.values()], 0) for _ in range(2))
    for file in drawn:
        samples[file["corpus"]] += file["drawn_samples"]
        tokens[file["corpus"]] += file["tokens"]
    whole = sum(samples.values())
    all_tokens = sum(tokens.values())
    return [
        _describe(
            name,
            pairs.get(name, []),
            share=number / whole,
            trained_tokens=tokens[name],
            all_tokens=all_tokens,
            run=run,
        )
        for name, number in samples.items()
    ]


def total(corpora: list[Component]) -> Component:
    """Sum of corpora; its epochs are the tokens drawn over the training tokens there are."""
    share = sum(corpus.share_of_tokens for corpus in corpora)
    trained_tokens = sum(corpus.trained_tokens for corpus in corpora)
    drawn = sum(corpus.epochs * corpus.trained_tokens for corpus in corpora)
    text_bytes = [corpus.text_bytes for corpus in corpora]
    return Component(
        name="all",
        files=sum(corpus.files for corpus in corpora),
        documents=sum(corpus.documents for corpus in corpora),
        tokens=sum(corpus.tokens for corpus in corpora),
        text_bytes=_sum_known(text_bytes),
        share_of_tokens=share,
        share_of_samples=sum(corpus.share_of_samples for corpus in corpora),
        epochs=drawn / trained_tokens if trained_tokens else 0.0,
        trained_tokens=trained_tokens,
        lengths=tuple(length_histogram.add(corpus.lengths for corpus in corpora)),
        **_counts([corpus._asdict() for corpus in corpora]),
    )


def largest(corpora: list[Component], most: int) -> list[Component]:
    """All corpora, or with more than `most` the largest and the sum of the others."""
    if len(corpora) <= most:
        return corpora
    ordered = sorted(corpora, key=lambda corpus: (-corpus.share_of_samples, corpus.name))
    rest = ordered[most - 1 :]
    return [*ordered[: most - 1], total(rest)._replace(name=f"{len(rest)} others")]


def _describe(
    name: str,
    pairs: list[dict],
    *,
    share: float,
    trained_tokens: int,
    all_tokens: int,
    run: Run,
) -> Component:
    tokens = _sum(pairs, "total_num_tokens")
    train = run.train
    drawn = share * (train.num_samples or 0) * train.sequence_length
    return Component(
        name=name,
        files=len(pairs),
        documents=_sum(pairs, "total_num_docs"),
        tokens=tokens,
        text_bytes=_sum_known([pair.get("text_bytes") for pair in pairs]),
        share_of_tokens=trained_tokens / all_tokens if all_tokens else 0.0,
        share_of_samples=share,
        epochs=drawn / trained_tokens if trained_tokens else 0.0,
        trained_tokens=trained_tokens,
        lengths=tuple(length_histogram.add(pair["lengths"] for pair in pairs)),
        **_counts(pairs),
    )


def _counts(parts: list[dict]) -> dict[str, int | None]:
    """Sums of what became of the raw files' documents; None where it is not told of all parts."""
    return {key: _sum_known([part.get(key) for part in parts]) for key in _FATES}


def _sum_known(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _sum(pairs: list[dict], key: str) -> int:
    return sum(pair[key] for pair in pairs)
