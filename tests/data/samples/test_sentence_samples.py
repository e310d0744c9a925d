"""Records of sentence data: batches, resumption, documents, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.sentence_data import SentenceData, build_index
from tokamake import files
from tokamake.config.batching import BatchSizes
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.loader import open_samples
from tokamake.data.samples.steps import batches, steps
from tokamake.errors import UserError
from tokamake.train.objectives.masked.samples import MaskedSamples
from tokamake.train.stability.events import documents_of


@pytest.fixture(scope="module")
def folder(sentences: SentenceData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_index(sentences, tmp_path_factory.mktemp("masked") / "index")


@pytest.fixture
def samples(folder: Path, sentences: SentenceData) -> MaskedSamples:
    return MaskedSamples(folder, split="train", data_root=sentences.root)


def test_batches_stack_the_fields(samples: MaskedSamples) -> None:
    rows = batches(
        samples,
        consumed_samples=8,
        micro_batch_size=4,
        data_parallel_rank=1,
        data_parallel_size=2,
    )
    batch = next(rows)
    assert batch.shape == (4,)
    assert batch["tokens"].shape == batch["labels"].shape == (4, 64)
    assert batch["is_swapped"].shape == (4,)
    for row, sample in enumerate(range(12, 16)):
        np.testing.assert_array_equal(batch[row], samples[sample])


@pytest.mark.parametrize("objective", ["masked", "span_corruption"])
def test_ranks_and_resumed_runs_make_the_same_bytes(
    sentences: SentenceData, tmp_path: Path, objective: str
) -> None:
    folder = build_index(sentences, tmp_path / "index", objective=objective)

    def read(num_ranks: int, first: int) -> bytes:
        """Samples from `first` on, each process with its own instance, in the global order."""
        parts = []
        for rank in range(num_ranks):
            own = open_samples(folder, split="train", data_root=sentences.root)
            split = steps(
                own,
                BatchSizes(8),
                consumed_samples=first,
                micro_batch_size=8 // num_ranks,
                data_parallel_rank=rank,
                data_parallel_size=num_ranks,
            )
            parts.append([step.micro_batches[0] for step in split])
        together = (np.concatenate(step) for step in zip(*parts, strict=True))
        return np.concatenate([*together]).tobytes()

    whole = read(1, 0)
    assert read(4, 0) == whole
    resumed = read(2, 40)
    assert whole.endswith(resumed)
    assert resumed


def test_sentences_are_those_of_one_document(
    samples: MaskedSamples, sentences: SentenceData
) -> None:
    for sample in range(40):
        spans = samples.spans(sample)
        dataset = IndexedDataset(sentences.root / spans[0].prefix)
        tokens = np.concatenate([dataset[span.sequence][span.start : span.stop] for span in spans])
        np.testing.assert_array_equal(samples.sentences(sample).tokens, tokens)
        documents = documents_of(samples, [sample], data_root=sentences.root)
        assert [len(numbers) for numbers in documents.values()] == [1]
        assert sample in samples.samples_of(spans[-1].prefix, spans[-1].sequence)
        assert samples.corpus_of(sample) == spans[0].prefix
    assert samples.corpora == ("docs", "code")


def test_indexes_of_other_objectives_are_refused(folder: Path, sentences: SentenceData) -> None:
    with pytest.raises(UserError, match="samples of objective masked, not causal"):
        DocumentSamples(folder, split="train", data_root=sentences.root)
    opened = open_samples(folder, split="valid", data_root=sentences.root)
    assert isinstance(opened, MaskedSamples)


def test_a_dataset_that_does_not_match_is_one_line(folder: Path, sentences: SentenceData) -> None:
    changed = MaskedSamples(folder, split="train", data_root=sentences.root)
    dataset = changed._dataset(changed._dataset_number(0))
    dataset.tokens = np.full_like(dataset.tokens, 60_000)
    with pytest.raises(UserError, match=r"sample 0: a token is not in the vocabulary: the dataset"):
        changed[0]


def test_an_index_without_an_objective_is_refused(folder: Path, tmp_path: Path) -> None:
    description = json.loads((folder / "index.json").read_text())
    del description["objective"], description["digest"]
    description["digest"] = files.digest(description)
    (tmp_path / "index.json").write_text(json.dumps(description))
    for name in ("train", "valid", "pieces.npy"):
        (tmp_path / name).symlink_to(folder / name)
    with pytest.raises(UserError, match="its samples are documents, not sentences"):
        MaskedSamples(tmp_path, split="train", data_root=tmp_path, verify=False)
