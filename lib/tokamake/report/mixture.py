"""Contents of each corpus, and its share of the training samples of a run.

Counts are from the metadata of `describe`, shares from the index, sizes from the resolved run.
"""

from pathlib import Path
from typing import NamedTuple

from tokamake import files
from tokamake.config.resolved_run import Run
from tokamake.data.indexed import length_histogram
from tokamake.data.indexed.length_histogram import Bin
from tokamake.data.samples.index_folder import read_index
from tokamake.errors import UserError

DOCUMENT_COUNTS = (
    *("documents_in", "empty_documents", "duplicate_documents", "quarantined_documents"),
)


class Component(NamedTuple):
    """A corpus of the mixture, or the total of several corpora."""

    name: str
    files: int
    """Merged datasets."""
    documents: int
    tokens: int
    text_bytes: int | None
    """Bytes of the raw text in UTF-8; None: unknown for a dataset."""
    share_of_tokens: float
    """Share of all training tokens, 0 to 1."""
    share_of_samples: float
    """Share of the training samples of the run, 0 to 1."""
    epochs: float
    """Passes of the run over the training documents."""
    trained_tokens: int
    """Tokens of the training documents."""
    lengths: tuple[Bin, ...] = ()
    """Histogram of document lengths in tokens, including the end-of-document token."""
    documents_in: int | None = None
    """Documents in the raw files, including empty, duplicate and quarantined ones."""
    empty_documents: int | None = None
    """Documents without tokens."""
    duplicate_documents: int | None = None
    """Documents dropped because an earlier document is equal."""
    quarantined_documents: int | None = None
    """Documents that could not be read."""


def read_mixture(*, metadata: Path, index: Path, run: Run) -> list[Component]:
    """Read all corpora in the order of the metadata. Without training samples, the share is 0."""
    train_files = read_index(index)["splits"]["train"]["files"]
    corpus_of_prefix = {file["prefix"]: file["corpus"] for file in train_files}
    datasets: dict[str, list[dict]] = {}
    for dataset in files.read_json(metadata, "make it with `tokamake describe`"):
        if "lengths" not in dataset:
            raise UserError(f"{metadata}: has no lengths; rerun `tokamake describe`")
        name = corpus_of_prefix.get(dataset["data_prefix"], dataset["corpus"])
        datasets.setdefault(name, []).append(dataset)
    corpora = [*datasets, *corpus_of_prefix.values()]
    samples, tokens = dict.fromkeys(corpora, 0), dict.fromkeys(corpora, 0)
    for file in train_files:
        samples[file["corpus"]] += file["drawn_samples"]
        tokens[file["corpus"]] += file["tokens"]
    all_samples, all_tokens = sum(samples.values()), sum(tokens.values())
    return [
        _describe(
            name,
            datasets.get(name, []),
            share=number / all_samples,
            trained_tokens=tokens[name],
            all_tokens=all_tokens,
            run=run,
        )
        for name, number in samples.items()
    ]


def total(corpora: list[Component]) -> Component:
    """Sum of corpora. Its epochs are consumed tokens divided by training tokens."""
    trained_tokens = sum(corpus.trained_tokens for corpus in corpora)
    consumed_tokens = sum(corpus.epochs * corpus.trained_tokens for corpus in corpora)
    return Component(
        name="all",
        files=sum(corpus.files for corpus in corpora),
        documents=sum(corpus.documents for corpus in corpora),
        tokens=sum(corpus.tokens for corpus in corpora),
        text_bytes=_sum_known([corpus.text_bytes for corpus in corpora]),
        share_of_tokens=sum(corpus.share_of_tokens for corpus in corpora),
        share_of_samples=sum(corpus.share_of_samples for corpus in corpora),
        epochs=consumed_tokens / trained_tokens if trained_tokens else 0.0,
        trained_tokens=trained_tokens,
        lengths=tuple(length_histogram.add(corpus.lengths for corpus in corpora)),
        **_counts([corpus._asdict() for corpus in corpora]),
    )


def largest(corpora: list[Component], max_rows: int) -> list[Component]:
    """Return all corpora, or the largest and the sum of the others, in at most `max_rows` rows."""
    if len(corpora) <= max_rows:
        return corpora
    ordered = sorted(corpora, key=lambda corpus: (-corpus.share_of_samples, corpus.name))
    small = ordered[max_rows - 1 :]
    return [*ordered[: max_rows - 1], total(small)._replace(name=f"{len(small)} others")]


def _describe(
    name: str, datasets: list[dict], *, share: float, trained_tokens: int, all_tokens: int, run: Run
) -> Component:
    tokens = sum(dataset["total_num_tokens"] for dataset in datasets)
    consumed_tokens = share * (run.train.num_samples or 0) * run.train.sequence_length
    return Component(
        name=name,
        files=len(datasets),
        documents=sum(dataset["total_num_docs"] for dataset in datasets),
        tokens=tokens,
        text_bytes=_sum_known([dataset.get("text_bytes") for dataset in datasets]),
        share_of_tokens=trained_tokens / all_tokens if all_tokens else 0.0,
        share_of_samples=share,
        epochs=consumed_tokens / trained_tokens if trained_tokens else 0.0,
        trained_tokens=trained_tokens,
        lengths=tuple(length_histogram.add(dataset["lengths"] for dataset in datasets)),
        **_counts(datasets),
    )


def _counts(parts: list[dict]) -> dict[str, int | None]:
    """Sum the counts of documents; None if a part does not have the count."""
    return {key: _sum_known([part.get(key) for part in parts]) for key in DOCUMENT_COUNTS}


def _sum_known(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
