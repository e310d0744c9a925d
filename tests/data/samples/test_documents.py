"""The documents of samples, compared with the tokens of both."""

from pathlib import Path

import numpy as np

from tests.support.runs import prepare
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.documents import documents_of
from tokamake.data.samples.loader import Samples


def test_the_documents_of_samples_have_their_tokens(tmp_path: Path) -> None:
    prepare(tmp_path)
    samples = Samples(tmp_path / "index", split="train", data_root=tmp_path)
    dataset = IndexedDataset(tmp_path / "corpus")
    for numbers in (range(3), range(16, 24)):
        (documents,) = documents_of(samples, numbers, data_root=tmp_path).values()
        assert documents == sorted({*documents})
        spans = [span for number in numbers for span in samples.spans(number)]
        bounds = dataset.document_bounds
        after = {int(np.searchsorted(bounds, span.sequence, "right")) for span in spans}
        assert documents == sorted(number - 1 for number in after)
        tokens = {int(token) for document in documents for token in dataset[document]}
        assert tokens >= {int(token) for number in numbers for token in samples[number]}
