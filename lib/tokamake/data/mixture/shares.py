"""What share of the training each corpus has, by the weights, epochs or temperatures it states.

Rows of the table of corpora and their tokens come from `weigh` and `lint_weights`.
"""

import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction
from pathlib import Path

from tokamake.data.corpus import splits
from tokamake.data.corpus.corpora import Corpus
from tokamake.errors import UserError

# Decimals are powers to the same digits on every machine, and know no overflow here.
_DECIMALS = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN)

TOLERANCE = 0.01
"""How far epochs may be, relatively, from those stated before it is worth a word."""


def seen_tokens(corpora: list[Corpus], tokens: dict[str, int], split: str | None) -> dict[str, int]:
    """Tokens of each corpus that are in its part for training, as near as shares tell."""
    if split and not splits.shares(split)[0] and not all(row.sets for row in corpora):
        raise UserError(f"split: {split!r}: nothing to train on; give the first number a share")
    return {
        row.corpus: max(1, part_tokens(tokens[row.corpus], row.parts.get("train"), split))
        for row in corpora
    }


def part_tokens(tokens: int, part: splits.Part | None, split: str | None) -> int:
    """Tokens of a part of some documents, as near as its share tells; None: what the split leaves
    for training, or all."""
    if part:
        return round(tokens * (part[1] - part[0]))
    return round(tokens * splits.shares(split)[0]) if split else tokens


def shares(
    corpora: list[Corpus], tokens: dict[str, int], *, train_tokens: int | None, table: Path
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
        if whole < math.inf:
            return _positive({row.corpus: (row.weight or 0) / whole for row in corpora}, table)
    fixed = {row.corpus: Fraction(row.epochs) * tokens[row.corpus] for row in corpora if row.epochs}
    others = {row.corpus: _part(row, tokens) for row in corpora if not row.epochs}
    needed = sum(fixed.values(), Fraction())
    left = _left(needed, train_tokens, others, table)
    whole_part = sum(others.values(), Fraction())
    drawn = fixed | {corpus: left * part / whole_part for corpus, part in others.items()}
    found = {row.corpus: float(drawn[row.corpus] / (needed + left)) for row in corpora}
    return _positive(found, table)


def _positive(shares: dict[str, float], table: Path) -> dict[str, float]:
    for corpus, share in shares.items():
        if not share:
            raise UserError(
                f'{table}: corpus "{corpus}" gets a share below every number; raise its weight or '
                "temperature"
            )
    return shares


def _part(row: Corpus, tokens: dict[str, int]) -> Fraction:
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
