"""Options of `index` about the objective, and datasets that do not fit it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_datasets import write_dataset
from tests.support.runs import vouch
from tests.support.sentence_data import SentenceData, build_index
from tokamake import files
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.index_folder import identity
from tokamake.data.samples.loader import check_sentences, open_samples
from tokamake.errors import UserError

CAUSAL: dict[str, Any] = {"objective": "causal", "masking": {}}


def test_sentences_are_not_for_causal_models(sentences: SentenceData, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        build_index(sentences, tmp_path / "index", **CAUSAL)
    assert str(caught.value) == (
        f"{sentences.root / 'docs'}: its sequences are sentences (tokenize.split_sentences: true), "
        "which objective causal would shuffle; set train.objective to ict, masked or "
        "span_corruption, or tokenize the corpus with split_sentences: false"
    )


def make(root: Path, **stated: Any) -> SentenceData:
    """A dataset of documents of one sequence."""
    write_dataset(root / "a", [9] * 40)
    if stated:
        vouch(root / "a", vocab_size=400, **stated)
    (root / "weights.txt").write_text("1 a a\n")
    return SentenceData(root, root, root)


def test_training_on_an_old_index_of_sentences_is_refused(tmp_path: Path) -> None:
    """An earlier version made the index."""
    data = make(tmp_path)
    folder = build_index(data, tmp_path / "index", **CAUSAL, tokenizer=None)
    DocumentSamples(folder, split="train", data_root=tmp_path)
    vouch(tmp_path / "a", vocab_size=400, split_sentences=True)
    description = json.loads((folder / "index.json").read_text())
    # An index of a causal run has the bytes of earlier versions.
    assert {"objective", "masking"}.isdisjoint(description)
    with pytest.raises(UserError, match="a: its sequences are sentences"):
        _reopened(data, folder)


def _reopened(data: SentenceData, folder: Path) -> DocumentSamples:
    description = json.loads((folder / "index.json").read_text())
    description["pairs"] = {"a": identity(data.root, "a")}
    del description["digest"]
    files.write_json(folder / "index.json", {**description, "digest": files.digest(description)})
    return DocumentSamples(folder, split="train", data_root=data.root)


def test_documents_are_not_for_encoders(sentences: SentenceData, tmp_path: Path) -> None:
    data = make(tmp_path, split_sentences=False)
    with pytest.raises(UserError, match="are documents, objective masked needs sentences"):
        build_index(data, tmp_path / "index", tokenizer=sentences.extended)
    check_sentences(tmp_path / "a", objective="causal")


def test_datasets_of_other_programs_must_have_sentences(
    sentences: SentenceData, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^a: no document gives a sample: a sample has 2 or more"):
        build_index(make(tmp_path), tmp_path / "index", tokenizer=sentences.extended)
    folder = build_index(
        make(tmp_path),
        tmp_path / "index",
        tokenizer=sentences.extended,
        masking={"sentence_order": False},
    )
    assert len(open_samples(folder, split="train", data_root=tmp_path)) == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, "--tokenizer: missing; objective masked needs it"),
        ({"separate_last_epoch": True}, "separate_last_epoch: True: no effect on objective masked"),
        ({"sequence_length": 4}, "sequence_length: 4: too short for objective masked; give 5"),
        (
            {"masking": {"probability": 1.0}},
            "masking: probability: 1.0: input should be less than 1",
        ),
        ({"masking": {"propability": 0.1}}, "propability: unknown key"),
        (
            {"masking": {"decoder_sequence_length": 9}},
            "masking.decoder_sequence_length: 9: no effect on objective masked",
        ),
        ({"seed": 0}, "seed: 0: out of range; give 1"),
        (
            {**CAUSAL, "masking": {"max_ngram": 2}},
            "masking.max_ngram: 2: no effect on objective causal",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    sentences: SentenceData, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        build_index(sentences, tmp_path / "index", **changes)
    assert message in str(caught.value)


def test_another_tokenizer_is_refused(
    sentences: SentenceData, sampled: Path, tmp_path: Path
) -> None:
    raw = tuple(map(str, sorted((sampled / "raw/docs").glob("*"))))
    train_tokenizer(raw, kind="wordpiece", vocab_size=400, output=tmp_path / "other")
    with pytest.raises(UserError, match=r"docs: made with another tokenizer \("):
        build_index(sentences, tmp_path / "index", tokenizer=tmp_path / "other")
    # The tokenizer of the data, and the one that extends it, are both right.
    build_index(sentences, tmp_path / "index", tokenizer=sentences.tokenizer)


def test_documents_with_eod_are_named(
    sentences: SentenceData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = make(tmp_path, split_sentences=True, append_eod=True)
    with caplog.at_level(logging.WARNING):
        build_index(
            data,
            tmp_path / "index",
            tokenizer=sentences.extended,
            masking={"sentence_order": False},
        )
    assert any("a and 0 other datasets: documents end with" in text for text in caplog.messages)


def test_everything_that_decides_samples_is_in_the_request(
    sentences: SentenceData, tmp_path: Path
) -> None:
    """Megatron's cache forgets the split, the data and the fewest sentences."""
    variants: list[dict[str, Any]] = [
        {},
        {"split": "80,20,0"},
        {"seed": 2},
        {"sequence_length": 65},
        {"objective": "span_corruption"},
        {"tokenizer": sentences.tokenizer},
        {"masking": {"sentence_order": False}},
        {"masking": {"probability": 0.2}},
        {"masking": {"short_sequence_probability": 0.2}},
        {"masking": {"max_ngram": 2}},
    ]
    requests = []
    for number, changes in enumerate(variants):
        folder = build_index(sentences, tmp_path / str(number), **changes)
        requests.append(json.loads((folder / "index.json").read_text())["request"])
    assert len({*requests}) == len(variants)


@pytest.mark.parametrize("blend", ["weighted", "exact", "corpora"])
def test_blends_and_epochs_work_as_for_causal_runs(
    sentences: SentenceData, tmp_path: Path, blend: str
) -> None:
    folder = build_index(sentences, tmp_path / blend, blend=blend)
    samples = open_samples(folder, split="train", data_root=sentences.root)
    corpora = [samples.corpus_of(sample) for sample in range(len(samples))]
    assert abs(corpora.count("docs") / len(samples) - 0.7) < 0.02
    options: dict[str, Any] = {"train_samples": None, "epochs": ("1", "docs=2.5"), "blend": blend}
    folder = build_index(sentences, tmp_path / "epochs", **options)
    files = json.loads((folder / "index.json").read_text())["splits"]["train"]["files"]
    assert [file["num_samples"] == file["drawn_samples"] for file in files] == [True, True]
    assert files[1]["epochs"] == 1
    assert files[0]["epochs"] in (2, 3)
