"""Stage `weigh`: write the weighting file of the training, and those of other splits.

It computes weights from the table of corpora and the tokens that `describe` counted.
"""

import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.corpus.corpora import Corpus
    from tokamake.data.mixture.weights import WeightedPrefix

_log = logging.getLogger(__name__)


def weigh(
    *,
    corpora: Path,
    metadata: Path,
    output: Path,
    split: str | None = None,
    train_tokens: int | None = None,
    temperature: float | None = None,
    max_epochs: float = 4.0,
    leave_out: tuple[str, ...] = (),
) -> None:
    """Write the weighting file: divide each corpus' share among its datasets by their tokens.

    A corpus states a weight (its share relative to the others), epochs (how often the training sees
    it) or a temperature T (its share is in proportion to tokens ** (1 / T)). Corpora with weights
    or temperatures share the tokens that epochs leave.

    Weights sum to 1 and keep their full precision. Prefixes are relative to the folder of the
    output, so that you can move datasets and weighting file together.

    If corpora name their splits (column `sets`), each split but train gets its own weighting file:
    weights.txt, weights.valid.txt, weights.test.txt. If all corpora of a split state weights, these
    apply to it too; else it draws from all its documents alike, by tokens.

    Args:
        corpora: table of corpora with their weights, epochs or temperatures.
        metadata: JSON file that `describe` wrote for all datasets.
        output: weighting file of the training.
        split: shares of documents for training, validation and test, as `index` gets them; epochs
            then count training documents, without it whole corpora.
        train_tokens: tokens that the whole training sees; needed if only some corpora state epochs.
        temperature: temperature of the corpora that state nothing; 1 weighs corpora by size, a
            higher temperature makes the shares more equal.
        leave_out: corpora of the metadata to ignore, because another training uses them; the table
            has no row for them.
        max_epochs: number of epochs above which a corpus gets a warning. Beyond about 4 epochs,
            repeated tokens are worth clearly less than new ones (Muennighoff et al. 2023).

    Raises:
        UserError: a corpus has no dataset or no token, a dataset belongs to no corpus of the table,
            or the training has too few tokens for the epochs.
    """
    from tokamake.data.corpus.corpora import read_corpora
    from tokamake.data.mixture.shares import seen_tokens, shares
    from tokamake.files import read_json

    check_options(train_tokens, temperature)
    if not max_epochs > 0:
        raise UserError(f"--max-epochs: {max_epochs:g}: not above 0; give a number of epochs")
    rows = read_corpora(corpora, temperature=temperature)
    datasets = read_json(metadata, "create it with `tokamake describe`")
    datasets = [dataset for dataset in datasets if dataset.get("corpus") not in leave_out]
    tokens = _count_tokens(datasets, rows, metadata=metadata, corpora=corpora)
    training_rows = [row for row in rows if row.trains]
    if not training_rows:
        raise UserError(f"{corpora}: no corpus trains; add `train` to the sets column of one")
    seen = seen_tokens(training_rows, tokens, split=split)
    train = shares(training_rows, seen, train_tokens=train_tokens, table=corpora)
    _warn(
        training_rows, train, seen, train_tokens=train_tokens, max_epochs=max_epochs, table=corpora
    )
    parts = {row.corpus: row.parts for row in rows}
    root = os.path.relpath(metadata.parent, output.parent)
    for name, split_shares in {"train": train, **_held_out_shares(rows, tokens)}.items():
        path = output if name == "train" else split_weights_path(output, name)
        lines = [
            line._replace(part=parts[line.corpus].get(name))
            for line in _divide(split_shares, datasets, tokens=tokens, root=root)
        ]
        _write(path, lines)


def _divide(
    shares: dict[str, float], datasets: list[dict[str, Any]], *, tokens: dict[str, int], root: str
) -> "list[WeightedPrefix]":
    """Divide the share of each corpus among its datasets by their tokens.

    Args:
        shares: share of each corpus of a split.
        datasets: metadata of datasets; their prefixes become relative to the weighting file.
        tokens: tokens of each corpus.
        root: folder of the metadata, relative to that of the weighting file.
    """
    from tokamake.data.mixture.weights import WeightedPrefix

    return [
        WeightedPrefix(
            shares[corpus] * dataset["total_num_tokens"] / tokens[corpus],
            os.path.normpath(Path(root, dataset["data_prefix"])),
            corpus,
        )
        for dataset in datasets
        if (corpus := dataset["corpus"]) in shares
    ]


def _write(path: Path, lines: "list[WeightedPrefix]") -> None:
    from tokamake.data.mixture.weights import write_weighting_file
    from tokamake.runtime.console import counted

    write_weighting_file(path, lines)
    num_corpora = len({line.corpus for line in lines})
    print(f"{path}: {counted(len(lines), 'dataset')} of {num_corpora} corpora")


def split_weights_path(weights: Path, name: str) -> Path:
    """Path of a split's weighting file beside that of the training: weights.valid.txt."""
    return weights.with_name(f"{weights.stem}.{name}{weights.suffix}")


def _held_out_shares(rows: "list[Corpus]", tokens: dict[str, int]) -> dict[str, dict[str, float]]:
    """Return, for each split but train that corpora name, the shares of its corpora."""
    shares: dict[str, dict[str, float]] = {}
    names = dict.fromkeys(name for row in rows for name in row.parts if name != "train")
    for name in names:
        members = [row for row in rows if name in row.parts]
        all_weighted = all(row.weight for row in members)
        amounts = {
            row.corpus: (row.weight or 0)
            if all_weighted
            else tokens[row.corpus] * (row.parts[name][1] - row.parts[name][0])
            for row in members
        }
        total = math.fsum(amounts.values())
        shares[name] = {corpus: amount / total for corpus, amount in amounts.items()}
    return shares


def check_options(train_tokens: int | None, temperature: float | None) -> None:
    """Check the range of two options.

    Raises:
        UserError: one is out of range.
    """
    if train_tokens is not None and train_tokens < 1:
        raise UserError(f"--train-tokens: {train_tokens}: give a number of tokens, 1 or more")
    if temperature is not None and not 0.01 <= temperature < float("inf"):
        raise UserError(f"--temperature: {temperature:g}: give a finite number, 0.01 or more")


def _count_tokens(
    datasets: list[dict[str, Any]], rows: "list[Corpus]", *, metadata: Path, corpora: Path
) -> dict[str, int]:
    """Return the number of tokens of each corpus."""
    tokens = dict.fromkeys((row.corpus for row in rows), 0)
    for dataset in datasets:
        if not {"corpus", "data_prefix", "total_num_tokens"} <= set(dataset):
            raise UserError(f"{metadata}: not written by `tokamake describe`; recreate it")
        corpus = dataset["corpus"]
        if corpus not in tokens:
            raise UserError(f'{metadata}: corpus "{corpus}" is not in {corpora}; add a row')
        tokens[corpus] += dataset["total_num_tokens"]
    for row in rows:
        if tokens[row.corpus] == 0:
            raise UserError(
                f'{row.where}: corpus "{row.corpus}" has no token: {row.files} has no text under '
                f"{row.text_key}; remove the row, or fix the files"
            )
    return tokens


def _warn(
    rows: "list[Corpus]",
    shares: dict[str, float],
    tokens: dict[str, int],
    *,
    train_tokens: int | None,
    max_epochs: float,
    table: Path,
) -> None:
    """Warn of corpora with too many epochs, and of a training longer than all stated epochs."""
    from tokamake.data.mixture.shares import TOLERANCE

    epoch_tokens = sum(row.epochs * tokens[row.corpus] for row in rows if row.epochs)
    all_state = all(row.epochs for row in rows)
    if all_state and train_tokens and epoch_tokens < train_tokens * (1 - TOLERANCE):
        _log.warning(
            "%s: its epochs make up %s tokens, the training has %s; every corpus is seen %.4g "
            "times as often as stated",
            *(table, f"{round(epoch_tokens):,}", f"{train_tokens:,}", train_tokens / epoch_tokens),
        )
    # If all corpora state epochs, these determine the length of the training.
    length = train_tokens or (epoch_tokens if all_state else 0)
    for corpus, share in shares.items():
        epochs = share * length / tokens[corpus]
        if epochs > max_epochs * (1 + 1e-9):  # tolerate rounding
            _log.warning(
                '%s: corpus "%s" is seen %.4g times, more than --max-epochs %g: it has %s tokens, '
                "%s are drawn from it; lower its share or add data",
                *(table, corpus, epochs, max_epochs),
                *(f"{tokens[corpus]:,}", f"{round(share * length):,}"),
            )
