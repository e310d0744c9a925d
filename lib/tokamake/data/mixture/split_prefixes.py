"""The sets of a run: which documents of which pairs train, validate and test.

Lines come from weighting files, documents from the rules of `splits`; `index` and `evaluate` ask.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokamake.data.corpus import splits
from tokamake.data.corpus.splits import NAMES, WHOLE, Rule
from tokamake.data.mixture.weights import Weighted, read_weights
from tokamake.errors import UserError

_log = logging.getLogger(__name__)


class SplitPrefixes:
    """Sets by name: train, test, and any other for a validation set.

    A set with a weighting file of its own consists of that alone: all of each pair in it, or the
    part that its line names. Other sets are what `split` makes of the pairs of the training's file;
    of a pair whose line names a part, that part trains and nothing else is taken.

    Args:
        weights: weighting file of the training.
        data_root: folder that the prefixes of all files are relative to.
        split: shares of each pair's documents for training, validation and test: "949,50,1".
        split_rule: how shares become documents.
        held_out: weighting files of other sets.

    Raises:
        UserError: a file cannot be read, or `split` is none.
    """

    def __init__(
        self,
        weights: Path,
        *,
        data_root: Path,
        split: str,
        split_rule: Rule,
        held_out: Mapping[str, Path],
    ) -> None:
        if "train" in held_out:
            raise UserError(f"{held_out['train']}: training has its own file; list it there")
        self._shares = dict(zip(NAMES, splits.shares(split), strict=True))
        self._split, self._rule, self._listed = split, split_rule, held_out
        lines = _read(weights, data_root)
        self._lines = dict.fromkeys(NAMES, lines)
        for name, path in held_out.items():
            self._lines[name] = _read(path, data_root)
            if self._shares.get(name) and not all(line.part for line in lines):
                _log.warning(
                    "%s is what %s lists; the share that split %r leaves for it is not used",
                    *(name, path, split),
                )

    @property
    def names(self) -> list[str]:
        """All sets: train, valid, test, others."""
        return list(self._lines)

    def lines(self, name: str) -> list[Weighted]:
        """What a set may draw from."""
        return self._lines[name]

    def is_listed(self, name: str) -> bool:
        """Whether a set has a weighting file of its own."""
        return name in self._listed

    def is_used(self, name: str) -> bool:
        """Whether a set is listed or has a share of the split."""
        return name in self._listed or self._shares[name] > 0 or name == "train"

    def origin(self, name: str) -> str:
        """What decides a set, for messages."""
        return str(self._listed.get(name, f"split: {self._split!r}"))

    def documents(self, name: str, line: Weighted, num_documents: int) -> range:
        """Documents of a pair that belong to a set; there may be none."""
        if name in self._listed:
            return splits.part_range(line.part or WHOLE, num_documents)
        if line.part:
            return splits.part_range(line.part, num_documents) if name == "train" else range(0)
        return splits.document_ranges(self._split, num_documents, self._rule)[name]


def _read(path: Path, data_root: Path) -> list[Weighted]:
    """Lines of a weighting file, one spelling for one pair."""
    lines = []
    for line in read_weights(path):
        relative = os.path.relpath(data_root / line.prefix, data_root)
        outside = Path(line.prefix).is_absolute() and relative.startswith("..")
        lines.append(line._replace(prefix=os.path.normpath(line.prefix) if outside else relative))
    return lines


def parse_held_out(options: Sequence[str]) -> dict[str, Path]:
    """Read NAME=FILE options.

    Raises:
        UserError: one has another form, or a name comes twice.
    """
    found: dict[str, Path] = {}
    for option in options:
        name, _, path = option.partition("=")
        if not splits.is_set_name(name) or not path:
            raise UserError(f"held_out: {option!r}: write NAME=FILE; {splits.NAMING}")
        if name.casefold() in map(str.casefold, found):
            raise UserError(f"held_out: {option!r}: {name} stands twice; leave one")
        found[name] = Path(path)
    return found
