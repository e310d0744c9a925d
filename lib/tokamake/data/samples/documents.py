"""Documents that samples are cut from."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.trace import document_of
from tokamake.data.samples.loader import DocumentSpan


class HasSpans(Protocol):
    """Samples that know where their tokens come from."""

    def spans(self, sample: int, /) -> list[DocumentSpan]: ...


def documents_of(
    samples: HasSpans, numbers: Iterable[int], *, data_root: Path
) -> dict[str, list[int]]:
    """Find the documents of some samples: ascending numbers by the prefix of their dataset."""
    sequences: dict[str, set[int]] = {}
    for sample in numbers:
        for span in samples.spans(sample):
            sequences.setdefault(span.prefix, set()).add(span.sequence)
    documents = {}
    for prefix in sorted(sequences):
        dataset = IndexedDataset(data_root / prefix)
        documents[prefix] = sorted({document_of(dataset, each) for each in sequences[prefix]})
    return documents
