"""Epochs of corpora.

Epochs are exact fractions: 1 epoch is exactly all samples, with no rounding error.
"""

from collections.abc import Sequence
from fractions import Fraction

from tokamake.data.mixture.weights import WeightedPrefix
from tokamake.errors import UserError

_MAX_EPOCHS = 10**6


def parse_epochs(options: Sequence[str], lines: Sequence[WeightedPrefix]) -> dict[str, Fraction]:
    """Epochs of each corpus of a weighting file: "1.5" applies to all, "wiki=3" to one."""
    corpora = dict.fromkeys(line.corpus for line in lines)
    parsed: dict[str, Fraction] = {}
    for option in options:
        corpus, _, number = option.rpartition("=")
        if corpus and corpus not in corpora:
            raise UserError(
                f"epochs: {option!r}: no such corpus in the weighting file; "
                f"choose one of {', '.join(corpora)}"
            )
        if corpus in parsed:
            raise UserError(f"epochs: {option!r}: given twice; remove one")
        parsed[corpus] = _number(option, number)
    default = parsed.pop("", None)
    epochs_of = {corpus: parsed.get(corpus, default) for corpus in corpora}
    for corpus, epochs in epochs_of.items():
        if options and epochs is None:
            raise UserError(f"epochs: corpus {corpus!r} has none; add {corpus}=NUMBER")
    return {corpus: epochs for corpus, epochs in epochs_of.items() if epochs is not None}


def _number(option: str, text: str) -> Fraction:
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if not 0 < number <= _MAX_EPOCHS:
        raise UserError(f"epochs: {option!r}: give a number above 0, up to {_MAX_EPOCHS:,}")
    return number
