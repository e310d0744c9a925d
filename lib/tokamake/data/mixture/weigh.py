"""Stage `weigh`: the weighting file, `weight prefix corpus` a line, from what the corpora state.

Shares come from the table of corpora and the tokens that `describe` counted; they go to `weights`.
"""

import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.corpus.corpora import Corpus
    from tokamake.data.mixture.weights import Weighted

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
    """Write the weighting file: a corpus' share is divided among its files by their tokens.

    A corpus states a weight (its share relative to the others), epochs (how often the training sees
    it) or a temperature T (its share is in proportion to tokens ** (1 / T)). Weights and
    temperatures share what epochs leave of the training.

    Weights sum to 1 and keep their full precision. Prefixes are relative to the output's folder, so
    that both can be moved without an edit.

    Where corpora name the sets that they are part of (column `sets`), each set but train gets a
    weighting file of its own: weights.txt, weights.valid.txt, weights.test.txt. If all its corpora
    state weights these hold in it too; else it draws from all alike, by tokens.

    Args:
        corpora: table of corpora with their weights, epochs or temperatures.
        metadata: JSON file that `describe` wrote for all pairs.
        output: weighting file of the training.
        split: shares of documents for training, validation and test, as `index` gets them: epochs
            are of what the training sees; without it of whole corpora.
        train_tokens: tokens that the whole training sees; needed where only some corpora state
            epochs.
        temperature: temperature of the corpora that state nothing; 1 is by size, more is flatter.
        leave_out: corpora of the metadata that are in no row of the table because others, not
            this training, draw from them.
        max_epochs: a corpus that the training sees more often gets a warning. Beyond about 4
            epochs, repeated tokens are worth clearly less than new ones (Muennighoff et al. 2023).

    Raises:
        UserError: a corpus has no pair or no token, or a pair belongs to no corpus of the table; or
            the epochs do not fit into the training.
    """
    from tokamake.data.corpus.corpora import read_corpora
    from tokamake.data.mixture.shares import seen_tokens, shares
    from tokamake.data.mixture.weights import write_weights
    from tokamake.files import read_json
    from tokamake.runtime.console import counted

    check_options(train_tokens, temperature)
    if not max_epochs > 0:
        raise UserError(f"--max-epochs: {max_epochs:g}: not above 0; give a number of epochs")
    rows = read_corpora(corpora, temperature=temperature)
    pairs = read_json(metadata, "make it with `tokamake describe`")
    pairs = [pair for pair in pairs if pair.get("corpus") not in leave_out]
    tokens = _count(pairs, rows, metadata, corpora)
    trained = [row for row in rows if row.trains]
    if not trained:
        raise UserError(f"{corpora}: no corpus trains; add `train` to the sets column of one")
    seen = seen_tokens(trained, tokens, split)
    parts = shares(trained, seen, train_tokens=train_tokens, table=corpora)
    _warn(trained, parts, seen, train_tokens=train_tokens, max_epochs=max_epochs, table=corpora)
    here = os.path.relpath(metadata.parent, output.parent)
    for name, share in {"train": parts, **_held_out(rows, tokens)}.items():
        path = output if name == "train" else set_path(output, name)
        lines = _entries(name, share, pairs, {row.corpus: row for row in rows}, tokens)
        named = [line._replace(prefix=os.path.normpath(Path(here, line.prefix))) for line in lines]
        write_weights(path, named)
        corpora_named = len({line.corpus for line in lines})
        print(f"{path}: {counted(len(lines), 'file')} of {corpora_named} corpora")


def set_path(weights: Path, name: str) -> Path:
    """Weighting file of a set beside that of the training: weights.txt, weights.valid.txt."""
    return weights.with_name(f"{weights.stem}.{name}{weights.suffix}")


def _held_out(rows: "list[Corpus]", tokens: dict[str, int]) -> dict[str, dict[str, float]]:
    """Shares of the corpora in each set that corpora name, train apart."""
    found: dict[str, dict[str, float]] = {}
    names = dict.fromkeys(name for row in rows for name in row.parts if name != "train")
    for name in names:
        members = [row for row in rows if name in row.parts]
        weighted = all(row.weight for row in members)
        parts = {
            row.corpus: (row.weight or 0)
            if weighted
            else tokens[row.corpus] * (row.parts[name][1] - row.parts[name][0])
            for row in members
        }
        found[name] = {corpus: part / math.fsum(parts.values()) for corpus, part in parts.items()}
    return found


def _entries(
    name: str,
    share: dict[str, float],
    pairs: list[dict[str, Any]],
    rows: "dict[str, Corpus]",
    tokens: dict[str, int],
) -> "list[Weighted]":
    """Lines of a set: the share of each corpus in it, divided among its files by their tokens."""
    from tokamake.data.mixture.weights import Weighted

    return [
        Weighted(
            share[corpus] * pair["total_num_tokens"] / tokens[corpus],
            pair["data_prefix"],
            corpus,
            rows[corpus].parts.get(name),
        )
        for pair in pairs
        if (corpus := pair["corpus"]) in share
    ]


def check_options(train_tokens: int | None, temperature: float | None) -> None:
    """Refuse numbers that mean nothing.

    Raises:
        UserError: one is out of range.
    """
    if train_tokens is not None and train_tokens < 1:
        raise UserError(f"--train-tokens: {train_tokens}: give a number of tokens, 1 or more")
    if temperature is not None and not 0.01 <= temperature < float("inf"):
        raise UserError(f"--temperature: {temperature:g}: give a finite number, 0.01 or more")


def _count(
    pairs: list[dict[str, Any]], rows: "list[Corpus]", metadata: Path, corpora: Path
) -> dict[str, int]:
    """Tokens of each corpus."""
    tokens = dict.fromkeys((row.corpus for row in rows), 0)
    for pair in pairs:
        if not {"corpus", "data_prefix", "total_num_tokens"} <= set(pair):
            raise UserError(f"{metadata}: not written by `tokamake describe`; make it again")
        if pair["corpus"] not in tokens:
            raise UserError(f'{metadata}: corpus "{pair["corpus"]}" is not in {corpora}; add a row')
        tokens[pair["corpus"]] += pair["total_num_tokens"]
    for corpus, total in tokens.items():
        if total == 0:
            raise UserError(f'{metadata}: corpus "{corpus}" has no token; remove it from {corpora}')
    return tokens


def _warn(
    rows: "list[Corpus]",
    parts: dict[str, float],
    tokens: dict[str, int],
    *,
    train_tokens: int | None,
    max_epochs: float,
    table: Path,
) -> None:
    """Say which corpora are seen too often, and where a long training outruns all epochs."""
    from tokamake.data.mixture.shares import TOLERANCE

    stated = sum(row.epochs * tokens[row.corpus] for row in rows if row.epochs)
    all_state = all(row.epochs for row in rows)
    if all_state and train_tokens and stated < train_tokens * (1 - TOLERANCE):
        _log.warning(
            "%s: its epochs make up %s tokens, the training has %s; every corpus is seen %.4g "
            "times as often as stated",
            *(table, f"{round(stated):,}", f"{train_tokens:,}", train_tokens / stated),
        )
    length = train_tokens or (stated if all_state else 0)
    for corpus, share in parts.items():
        epochs = share * length / tokens[corpus]
        if epochs > max_epochs * (1 + 1e-9):
            _log.warning(
                '%s: corpus "%s" is seen %.4g times, more than --max-epochs %g: it has %s tokens, '
                "%s are drawn from it; lower its share or add data",
                *(table, corpus, epochs, max_epochs),
                *(f"{tokens[corpus]:,}", f"{round(share * length):,}"),
            )
