"""Stage `weigh`: the weighting file, `weight prefix corpus` a line, from what the corpora state.

Shares come from the table of corpora and the tokens that `describe` counted; they go to `weights`.
"""

import logging
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.text.corpora import Corpus

# Decimals are powers to the same digits on every machine, and know no overflow here.
_DECIMALS = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN)

TOLERANCE = 0.01
"""How far epochs may be, relatively, from those stated before it is worth a word."""

_log = logging.getLogger(__name__)


def weigh(
    *,
    corpora: Path,
    metadata: Path,
    output: Path,
    train_tokens: int | None = None,
    temperature: float | None = None,
    max_epochs: float = 4.0,
) -> None:
    """Write the weighting file: a corpus' share is divided among its files by their tokens.

    A corpus states a weight (its share relative to the others), epochs (how often the training sees
    it) or a temperature T (its share is in proportion to tokens ** (1 / T)). Weights and
    temperatures share what epochs leave of the training.

    Weights sum to 1 and keep their full precision. Prefixes stay relative to the data root, so that
    the data can be moved without an edit.

    Args:
        corpora: table of corpora with their weights, epochs or temperatures.
        metadata: JSON file that `describe` wrote for all pairs.
        output: weighting file.
        train_tokens: tokens that the whole training sees; needed where only some corpora state
            epochs.
        temperature: temperature of the corpora that state nothing; 1 is by size, more is flatter.
        max_epochs: a corpus that the training sees more often gets a warning. Beyond about 4
            epochs, repeated tokens are worth clearly less than new ones (Muennighoff et al. 2023).

    Raises:
        UserError: a corpus has no pair or no token, or a pair belongs to no corpus of the table; or
            the epochs do not fit into the training.
    """
    from tokamake.data.mixture.weights import Weighted, write_weights
    from tokamake.data.text.corpora import read_corpora
    from tokamake.files import read_json
    from tokamake.runtime import counted

    check_options(train_tokens, temperature)
    if not max_epochs > 0:
        raise UserError(f"--max-epochs: {max_epochs:g}: not above 0; give a number of epochs")
    rows = read_corpora(corpora, temperature=temperature)
    pairs = read_json(metadata, "make it with `tokamake describe`")
    tokens = _count(pairs, rows, metadata, corpora)
    parts = shares(rows, tokens, train_tokens=train_tokens, table=corpora)
    _warn(rows, parts, tokens, train_tokens=train_tokens, max_epochs=max_epochs, table=corpora)
    entries = []
    for pair in pairs:
        corpus = pair["corpus"]
        weight = parts[corpus] * pair["total_num_tokens"] / tokens[corpus]
        entries.append(Weighted(weight, pair["data_prefix"], corpus))
    write_weights(output, entries)
    print(f"{output}: {counted(len(entries), 'file')} of {len(rows)} corpora")


def check_options(train_tokens: int | None, temperature: float | None) -> None:
    """Refuse numbers that mean nothing.

    Raises:
        UserError: one is out of range.
    """
    if train_tokens is not None and train_tokens < 1:
        raise UserError(f"--train-tokens: {train_tokens}: give a number of tokens, 1 or more")
    if temperature is not None and not 0.01 <= temperature < float("inf"):
        raise UserError(f"--temperature: {temperature:g}: give a finite number, 0.01 or more")


def shares(
    corpora: "list[Corpus]", tokens: dict[str, int], *, train_tokens: int | None, table: Path
) -> dict[str, float]:
    """Share of the training samples of every corpus; they add up to 1.

    Temperatures: Xue et al. 2021 (mT5), who write 1 / T as alpha.

    Args:
        corpora: rows of the table.
        tokens: tokens of each corpus, above 0.
        train_tokens: tokens that the whole training sees, if known.
        table: what errors name.

    Raises:
        UserError: epochs need more tokens than there are, or the number is missing; or a corpus is
            left with nothing.
    """
    if all(row.weight for row in corpora):
        # In floats, as ever: what came of a table of weights has to stay the same to the last bit.
        whole = sum(row.weight or 0 for row in corpora)
        return {row.corpus: (row.weight or 0) / whole for row in corpora}
    fixed = {row.corpus: Fraction(row.epochs) * tokens[row.corpus] for row in corpora if row.epochs}
    others = {row.corpus: _part(row, tokens) for row in corpora if not row.epochs}
    needed = sum(fixed.values(), Fraction())
    left = _left(needed, train_tokens, others, table)
    whole_part = sum(others.values(), Fraction())
    drawn = fixed | {corpus: left * part / whole_part for corpus, part in others.items()}
    found = {row.corpus: float(drawn[row.corpus] / (needed + left)) for row in corpora}
    for corpus, share in found.items():
        if not share:
            raise UserError(
                f'{table}: corpus "{corpus}" gets a share below every number; raise its temperature'
            )
    return found


def _part(row: "Corpus", tokens: dict[str, int]) -> Fraction:
    """What a corpus with a weight or a temperature claims, relative to others of its kind."""
    if row.temperature is None:
        return Fraction(row.weight or 0)
    exponent = _DECIMALS.divide(Decimal(1), Decimal(row.temperature))
    return Fraction(_DECIMALS.power(Decimal(tokens[row.corpus]), exponent))


def _left(
    needed: Fraction, train_tokens: int | None, others: dict[str, Fraction], table: Path
) -> Fraction:
    """Tokens of the training that epochs leave to the other corpora."""
    if not others:
        if train_tokens and needed > train_tokens * (1 + Fraction(TOLERANCE)):
            raise _too_long(needed, train_tokens, table)
        return Fraction()
    if not needed:
        return Fraction(1)
    if train_tokens is None:
        raise UserError(
            f"{table}: some corpora state epochs and others do not, so shares depend on how long "
            "the training is; give --train-tokens, or epochs to all"
        )
    if needed > train_tokens:
        raise _too_long(needed, train_tokens, table)
    if needed == train_tokens:
        raise UserError(
            f"{table}: its epochs take all {train_tokens:,} tokens of the training and leave "
            f"nothing to {', '.join(others)}; lower epochs or train longer"
        )
    return train_tokens - needed


def _too_long(needed: Fraction, train_tokens: int, table: Path) -> UserError:
    return UserError(
        f"{table}: its epochs need {round(needed):,} tokens, the training has {train_tokens:,} "
        "(--train-tokens); lower epochs or train longer"
    )


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
