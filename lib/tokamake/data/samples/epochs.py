"""How often a training sees its files, said in epochs, and how many samples that is.

Options come from `index`; fractions are exact, so that an epoch is one to the sample.
"""

from collections.abc import Sequence
from fractions import Fraction

from tokamake.data.mixture.weights import Weighted
from tokamake.errors import UserError

_MOST = 10**6


def parse_epochs(options: Sequence[str], lines: Sequence[Weighted]) -> dict[str, Fraction]:
    """Epochs of each corpus of a weighting file: "1.5" is for all, "wiki=3" for one.

    Raises:
        UserError: an option is no number above 0, a corpus is unknown, comes twice or gets none.
    """
    corpora = dict.fromkeys(line.corpus for line in lines)
    stated: dict[str, Fraction] = {}
    for option in options:
        corpus, _, number = option.rpartition("=")
        if corpus and corpus not in corpora:
            raise UserError(
                f"epochs: {option!r}: no corpus of that name is weighted; "
                f"choose one of {', '.join(corpora)}"
            )
        if corpus in stated:
            raise UserError(f"epochs: {option!r}: stands twice; leave one")
        stated[corpus] = _number(option, number)
    of_all = stated.pop("", None)
    found = {corpus: stated.get(corpus, of_all) for corpus in corpora}
    for corpus, epochs in found.items():
        if options and epochs is None:
            raise UserError(f"epochs: corpus {corpus!r} gets none; add {corpus}=NUMBER")
    return {corpus: epochs for corpus, epochs in found.items() if epochs is not None}


def _number(option: str, text: str) -> Fraction:
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if not 0 < number <= _MOST:
        raise UserError(f"epochs: {option!r}: give a number above 0, up to {_MOST:,}")
    return number


def count_samples(epochs: Fraction, *, sequence_length: int, tokens_per_epoch: int) -> int:
    """Whole samples in some epochs of a file; the last label of one is the first token of the
    next, which takes one token more than they see."""
    return max(0, int((epochs * tokens_per_epoch - 1) // sequence_length))
