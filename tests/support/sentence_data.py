"""Real text as sentences, its WordPiece tokenizer, and megatron-core's datasets of BERT and T5."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokamake.data.corpus.extend_tokenizer import extend_tokenizer
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.samples.index import index
from tokamake.data.tokenize.tokenize import tokenize

if TYPE_CHECKING:  # importing megatron.core takes seconds, of every start of pytest
    from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset

SEED = 1234
VOCAB_SIZE = 500


class SentenceData(NamedTuple):
    """A folder with datasets of sentences."""

    root: Path
    """Folder with docs.bin, code.bin, their indexes, and weights.txt."""
    tokenizer: Path
    """WordPiece tokenizer."""
    extended: Path
    """The same with [BOS], [EOS] and 100 sentinels."""


def at(folder: Path) -> SentenceData:
    """The data that `make_sentences` wrote."""
    return SentenceData(folder / "data", folder / "wordpiece", folder / "extended")


def make_sentences(folder: Path, raw: Path) -> None:
    """Tokenize the raw files of the corpora docs and code as sentences."""
    data = at(folder)
    data.root.mkdir()
    files = {corpus: [*map(str, sorted((raw / corpus).glob("*")))] for corpus in ("docs", "code")}
    train_tokenizer(
        tuple(files["docs"]), kind="wordpiece", vocab_size=VOCAB_SIZE, output=data.tokenizer
    )
    extend_tokenizer(tokenizer=data.tokenizer, output=data.extended)
    for corpus, paths in files.items():
        tokenize(
            tuple(paths),
            tokenizer=data.tokenizer,
            split_sentences=True,
            append_eod=False,
            output=data.root / corpus,
        )
    (data.root / "weights.txt").write_text("0.7 docs docs\n0.3 code code\n")


def make_titled(folder: Path, data: SentenceData, *, rows: Iterable[dict[str, str]]) -> None:
    """Write the datasets wiki_text and wiki_title of documents with text and title."""
    (folder / "wiki.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize(
        (str(folder / "wiki.jsonl"),),
        text_key=("text", "title"),
        tokenizer=data.tokenizer,
        split_sentences=True,
        append_eod=False,
        empty_documents="keep",
        output=folder / "wiki",
    )


def sentences_of(lengths: Iterable[int]) -> str:
    """Sentences with numbers of words."""
    return " ".join(f"Place {n}" + " and more" * m + "." for n, m in enumerate(lengths))


def build_index(data: SentenceData, output: Path, **changes: Any) -> Path:
    """Index the datasets; `masking` is a dict."""
    settings: dict[str, Any] = {
        "weights": data.root / "weights.txt",
        "data_root": data.root,
        "sequence_length": 64,
        "train_samples": 200,
        "valid_samples": 20,
        "split": "90,10,0",
        "objective": "masked",
        "tokenizer": data.extended,
        "seed": SEED,
        "output": output,
    }
    settings |= changes
    index(**{**settings, "masking": json.dumps(settings.get("masking", {}))})
    return output


def megatron_tokenizer(path: Path) -> SimpleNamespace:
    """What megatron-core's datasets ask of a tokenizer."""
    definition = json.loads((path / "tokenizer.json").read_text())
    vocabulary = dict(definition["model"]["vocab"])
    vocabulary |= {token["content"]: token["id"] for token in definition["added_tokens"]}
    inverse = {vocabulary[text]: text for text in sorted(vocabulary, key=vocabulary.__getitem__)}
    special = {name: vocabulary.get(f"[{name.upper()}]") for name in ("cls", "sep", "mask", "pad")}
    return SimpleNamespace(
        **special,
        bos=vocabulary.get("[BOS]"),
        eos=vocabulary.get("[EOS]"),
        eod=-2,
        inv_vocab=inverse,
        additional_special_tokens_ids=[
            vocabulary[f"<extra_id_{number}>"]
            for number in range(100)
            if f"<extra_id_{number}>" in vocabulary
        ],
        unique_identifiers={},
    )


def megatron_datasets(
    data: SentenceData,
    cache: Path,
    *,
    sequence_length: int = 64,
    num_samples: tuple[int, int, int] = (200, 20, 0),
    decoder_length: int | None = None,
    head: bool = True,
    short: float = 0.1,
) -> list[Any]:
    """Blends of megatron-core of each split: of T5 with a decoder, else of BERT.

    The process needs a process group.
    """
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.t5_dataset import (
        T5MaskedWordPieceDataset,
        T5MaskedWordPieceDatasetConfig,
    )

    lines = [line.split() for line in (data.root / "weights.txt").read_text().splitlines()]
    settings: dict[str, Any] = {
        "random_seed": SEED,
        "sequence_length": sequence_length,
        "blend": ([str(data.root / line[1]) for line in lines], [float(line[0]) for line in lines]),
        "split": "90,10,0",
        "path_to_cache": str(cache),
        "tokenizer": megatron_tokenizer(data.extended),
        "masking_probability": 0.15,
        "short_sequence_probability": short,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }
    kind: type[MaskedWordPieceDataset]
    config: Any
    if decoder_length:
        kind = T5MaskedWordPieceDataset
        config = T5MaskedWordPieceDatasetConfig(
            **settings,
            masking_max_ngram=10,
            masking_use_geometric_distribution=True,
            sequence_length_decoder=decoder_length,
        )
    else:
        kind = BERTMaskedWordPieceDataset
        config = BERTMaskedWordPieceDatasetConfig(
            **settings,
            masking_max_ngram=3,
            masking_use_geometric_distribution=False,
            classification_head=head,
        )
    return BlendedMegatronDatasetBuilder(kind, list(num_samples), lambda: True, config).build()


def without_loss(labels: np.ndarray) -> np.ndarray:
    """Megatron's labels with tokamake's number where there is no loss."""
    return np.where(labels == -1, -100, labels)
