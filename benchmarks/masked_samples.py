"""Compare samples of BERT and T5 with megatron-core's datasets, in one process on one core.

    python benchmarks/masked_samples.py --corpus corpus.jsonl --tokenizer bert-base-uncased

Both make the same samples in turns, round by round, and must make equal ones. Printed figures are
medians.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)

from tokamake.data.corpus.extend_tokenizer import extend_tokenizer
from tokamake.data.samples.index import index
from tokamake.data.samples.loader import open_samples
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.data.tokenizers import open_tokenizer
from tokamake.runtime.process_group import process_group
from tokamake.runtime.ranks import Ranks

_SEED = 1234
_DECODER = 128


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl file")
    parser.add_argument("--tokenizer", type=Path, required=True, help="WordPiece tokenizer")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    prefix, tokenizer = prepare(options.corpus, options.tokenizer, work=options.work)
    print(
        "| samples | megatron-core, each s | tokamake, each s | times |\n| --- | --- | --- | --- |"
    )
    for objective in ("masked", "span_corruption"):
        print(row(objective, prefix, tokenizer=tokenizer, options=options), flush=True)


def prepare(corpus: Path, tokenizer: Path, *, work: Path) -> tuple[Path, Path]:
    """Tokenize the corpus as sentences; return its prefix and the tokenizer with sentinels."""
    work.mkdir(parents=True, exist_ok=True)
    prefix, extended = work / "sentences", work / "extended"
    if not extended.exists():
        extend_tokenizer(tokenizer=tokenizer, output=extended)
        tokenize(
            (str(corpus),),
            tokenizer=tokenizer,
            split_sentences=True,
            append_eod=False,
            output=prefix,
        )
        (work / "weights.txt").write_text("1 sentences corpus\n")
    return prefix, extended


def row(objective: Any, prefix: Path, *, tokenizer: Path, options: argparse.Namespace) -> str:
    """Run both in turns and format the medians as a row of the table."""
    work, num_samples = options.work, options.samples
    decoder = {"decoder_sequence_length": _DECODER} if objective == "span_corruption" else {}
    index(
        weights=work / "weights.txt",
        data_root=work,
        sequence_length=options.length,
        train_samples=num_samples,
        valid_samples=0,
        split="1,0,0",
        objective=objective,
        masking=json.dumps(decoder),
        tokenizer=tokenizer,
        seed=_SEED,
        output=work / objective,
    )
    ours = open_samples(work / objective, split="train", data_root=work)
    with process_group(Ranks(0, 1, 0, 1)):
        theirs = megatron(objective, prefix, tokenizer=tokenizer, options=options)
    readers: list[Callable[[int], Any]] = [theirs.__getitem__, ours.__getitem__]
    seconds: list[list[float]] = [[], []]
    for number in range(options.rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            for sample in range(num_samples):
                readers[place](sample)
            seconds[place].append(time.perf_counter() - start)
    tokens = "text" if objective == "masked" else "text_enc"
    for sample in range(num_samples):
        np.testing.assert_array_equal(ours[sample]["tokens"], theirs[sample][tokens])
    slow, fast = (num_samples / median(times) for times in seconds)
    return (
        f"| {objective}, {options.length} tokens | {slow:,.0f} | {fast:,.0f} | {fast / slow:.1f} |"
    )


def megatron(objective: str, prefix: Path, *, tokenizer: Path, options: argparse.Namespace) -> Any:
    """Dataset of megatron-core."""
    settings: dict[str, Any] = {
        "random_seed": _SEED,
        "sequence_length": options.length,
        "blend": ([str(prefix)], [1.0]),
        "split": "1,0,0",
        "path_to_cache": str(options.work / "cache"),
        "tokenizer": megatron_tokenizer(tokenizer),
        "masking_probability": 0.15,
        "short_sequence_probability": 0.1,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }
    kind: Any = BERTMaskedWordPieceDataset
    config: Any = BERTMaskedWordPieceDatasetConfig
    own: dict[str, Any] = {"masking_max_ngram": 3, "classification_head": True}
    if objective == "span_corruption":
        kind, config = T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
        own = {"masking_max_ngram": 10, "sequence_length_decoder": _DECODER}
    own["masking_use_geometric_distribution"] = objective == "span_corruption"
    sizes = [options.samples, 0, 0]
    builder = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config(**settings, **own))
    return builder.build()[0]


def megatron_tokenizer(path: Path) -> SimpleNamespace:
    """What megatron-core's datasets ask of a tokenizer."""
    definition = json.loads(open_tokenizer(path).definition())
    ids = dict(definition["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in definition["added_tokens"]}
    return SimpleNamespace(
        **{name: ids[f"[{name.upper()}]"] for name in ("cls", "sep", "mask", "pad", "bos", "eos")},
        eod=-2,
        inv_vocab={ids[text]: text for text in sorted(ids, key=ids.__getitem__)},
        additional_special_tokens_ids=[ids[f"<extra_id_{number}>"] for number in range(100)],
        unique_identifiers={},
    )


if __name__ == "__main__":
    main()
