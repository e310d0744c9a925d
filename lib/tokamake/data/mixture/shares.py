"""Shares of the corpora in the training samples, from their weights, epochs or temperatures."""

import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction
from pathlib import Path

from tokamake.data.corpus import splits
from tokamake.data.corpus.corpora import Corpus
from tokamake.errors import UserError

# Decimal powers have the same digits on every machine. This range of exponents cannot overflow.
_DECIMALS = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN)

TOLERANCE = 0.01
"""Relative difference from the stated epochs that needs no message."""
MANY_EPOCHS = 4
"""Beyond this, repeated tokens are worth clearly less than new ones (Muennighoff et al. 2023, arXiv
2305.16264)."""


def seen_tokens(
    corpora: list[Corpus], tokens: dict[str, int], *, split: str | None
) -> dict[str, int]:
    """Return the number of training tokens of each corpus, estimated by shares of documents."""
    if split and not splits.shares(split)[0] and not all(row.sets for row in corpora):
        raise UserError(f"split: {split!r}: nothing to train on; give a share as the first number")
    return {
        row.corpus: max(1, _part_tokens(tokens[row.corpus], row.parts.get("train"), split=split))
        for row in corpora
    }


def _part_tokens(tokens: int, part: splits.FractionRange | None, *, split: str | None) -> int:
    """Estimate the tokens of a part of the documents; None: of the training split."""
    if part:
        return round(tokens * (part[1] - part[0]))
    return round(tokens * splits.shares(split)[0]) if split else tokens


def shares(
    corpora: list[Corpus], tokens: dict[str, int], *, train_tokens: int | None, table: Path
) -> dict[str, float]:
    """Return the share of the training samples of each corpus; the sum is 1.

    Temperatures follow Xue et al. 2021 (mT5), who write 1 / T as alpha. Epochs must fit
    `train_tokens`, and leave something for corpora without epochs.
    """
    if all(row.weight for row in corpora):
        # Floats, not fractions: a table of weights must always give the same bits.
        whole = sum(row.weight or 0 for row in corpora)
        if whole < math.inf:
            return _positive({row.corpus: (row.weight or 0) / whole for row in corpora}, table)
    by_epochs = {
        row.corpus: Fraction(row.epochs) * tokens[row.corpus] for row in corpora if row.epochs
    }
    claims = {row.corpus: _claim(row, tokens) for row in corpora if not row.epochs}
    needed = sum(by_epochs.values(), Fraction())
    remaining = _remaining_tokens(needed, train_tokens, claims=claims, table=table)
    total_claim = sum(claims.values(), Fraction())
    drawn = by_epochs | {
        corpus: remaining * claim / total_claim for corpus, claim in claims.items()
    }
    return _positive(
        {row.corpus: float(drawn[row.corpus] / (needed + remaining)) for row in corpora}, table
    )


def _positive(shares: dict[str, float], table: Path) -> dict[str, float]:
    for corpus, share in shares.items():
        if not share:
            raise UserError(
                f'{table}: the share of corpus "{corpus}" is too small for a float; raise its '
                "weight or temperature"
            )
    return shares


def _claim(row: Corpus, tokens: dict[str, int]) -> Fraction:
    """Return the weight of a corpus, or tokens ** (1 / T); only ratios of claims count."""
    if row.temperature is None:
        return Fraction(row.weight or 0)
    exponent = _DECIMALS.divide(Decimal(1), Decimal(row.temperature))
    return Fraction(_DECIMALS.power(Decimal(tokens[row.corpus]), exponent))


def _remaining_tokens(
    needed: Fraction, train_tokens: int | None, *, claims: dict[str, Fraction], table: Path
) -> Fraction:
    """Return the training tokens that epochs leave to corpora with weights or temperatures."""
    if not claims:
        if train_tokens and needed > train_tokens * (1 + Fraction(TOLERANCE)):
            raise _too_many_epochs(needed, train_tokens, table=table)
        return Fraction()
    if not needed:
        return Fraction(1)  # no epochs: the length of the training does not matter
    if train_tokens is None:
        raise UserError(
            f"{table}: some corpora state epochs and some do not, so shares depend on how long "
            "the training is; give --train-tokens, or epochs to all"
        )
    if needed > train_tokens:
        raise _too_many_epochs(needed, train_tokens, table=table)
    if needed == train_tokens:
        raise UserError(
            f"{table}: its epochs take all {train_tokens:,} tokens of the training and leave "
            f"nothing to {', '.join(claims)}; lower epochs or train longer"
        )
    return train_tokens - needed


def _too_many_epochs(needed: Fraction, train_tokens: int, *, table: Path) -> UserError:
    return UserError(
        f"{table}: its epochs need {round(needed):,} tokens, the training has {train_tokens:,} "
        "(--train-tokens); lower epochs or train longer"
    )
