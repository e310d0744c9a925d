"""Splits of a run: the documents that train, validate and test, by dataset.

Weighting files name the datasets; `data.corpus.splits` divides documents. `index` and `evaluate`
use it.
"""

import logging
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from tokamake.data.corpus import splits
from tokamake.data.corpus.splits import NAMES, WHOLE, SplitRule
from tokamake.data.mixture.weighting_file import WeightedPrefix, find_prefix, read_weighting_file
from tokamake.errors import UserError

_log = logging.getLogger(__name__)


class SplitPrefixes:
    """Splits by name: train, test, and any other name for a validation split.

    A split with its own weighting file consists of that file only: all documents of each dataset in
    it, or the part that its line names. The other splits take their shares of the datasets in the
    training's file. If a line of that file names a part, this part trains and no other split takes
    documents from the dataset.
    """

    def __init__(
        self,
        weights: Path,
        *,
        data_root: Path,
        split: str,
        split_rule: SplitRule,
        held_out: Mapping[str, Path],
    ) -> None:
        if "train" in held_out:
            raise UserError(
                f"{held_out['train']}: training has its own weighting file; name the datasets there"
            )
        self._shares = dict(zip(NAMES, splits.shares(split), strict=True))
        self._split, self._rule, self._held_out = split, split_rule, held_out
        lines = _read(weights, data_root)
        self._lines = dict.fromkeys(NAMES, lines)
        for name, path in held_out.items():
            self._lines[name] = _read(path, data_root)
            # Lines with a part leave nothing to other splits, so there is nothing to warn about.
            if self._shares.get(name) and not all(line.part for line in lines):
                without = ",".join(
                    "0" if each == name else share
                    for each, share in zip(NAMES, split.split(","), strict=False)
                )
                _log.warning(
                    "%s comes from %s, so no split takes the documents that split %r leaves for "
                    "it; to train on them, set train.split to %s",
                    *(name, path, split, without),
                )

    @property
    def names(self) -> list[str]:
        """Names of all splits: train, valid, test, then other names."""
        return list(self._lines)

    def lines(self, name: str) -> list[WeightedPrefix]:
        return self._lines[name]

    def leave_out(self, prefixes: Container[str]) -> None:
        """Remove datasets from all splits; the corpora that keep others keep their weights."""
        for name, lines in self._lines.items():
            kept = [line for line in lines if line.prefix not in prefixes]
            weights, left = _weights(lines), _weights(kept)
            self._lines[name] = [
                line._replace(weight=line.weight * weights[line.corpus] / left[line.corpus])
                if left[line.corpus]
                else line
                for line in kept
            ]

    def is_listed(self, name: str) -> bool:
        return name in self._held_out

    def is_used(self, name: str) -> bool:
        """Whether a split has its own weighting file or a share of the documents.

        A dataset with a part for training gives no share to other splits.
        """
        if name in self._held_out or name == "train":
            return True
        return self._shares[name] > 0 and not all(line.part for line in self._lines["train"])

    @property
    def evaluated(self) -> str | None:
        """The split to evaluate on: test, or else a validation split; None: neither is used."""
        names = ("test", *(name for name in self.names if name != "train"))
        return next((name for name in names if self.is_used(name)), None)

    def origin(self, name: str) -> str:
        """Return the file or option that defines a split, for messages."""
        return str(self._held_out.get(name, f"split: {self._split!r}"))

    def documents(self, name: str, line: WeightedPrefix, num_documents: int) -> range:
        """Return the documents of a dataset that belong to a split; the range may be empty."""
        if name in self._held_out:
            return splits.part_range(line.part or WHOLE, num_documents)
        if line.part:
            return splits.part_range(line.part, num_documents) if name == "train" else range(0)
        return splits.document_ranges(self._split, num_documents, rule=self._rule)[name]


def _weights(lines: Sequence[WeightedPrefix]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for line in lines:
        weights[line.corpus] = weights.get(line.corpus, 0.0) + line.weight
    return weights


def _read(path: Path, data_root: Path) -> list[WeightedPrefix]:
    """Read a weighting file and normalize prefixes, so that each dataset has one spelling."""
    lines = []
    for line in read_weighting_file(path):
        prefix = find_prefix(line.prefix, data_root, search=data_root != path.parent)
        relative = os.path.relpath(prefix, data_root)
        # An absolute prefix stays absolute if it is outside the data root.
        outside = Path(line.prefix).is_absolute() and relative.startswith("..")
        lines.append(line._replace(prefix=prefix if outside else relative))
    return lines


def parse_held_out(options: Sequence[str]) -> dict[str, Path]:
    """Parse NAME=FILE options."""
    paths: dict[str, Path] = {}
    for option in options:
        name, _, path = option.partition("=")
        if not splits.is_split_name(name) or not path:
            raise UserError(f"held_out: {option!r}: write NAME=FILE; {splits.NAMING}")
        # Names become file names, which some file systems compare without case.
        if name.casefold() in map(str.casefold, paths):
            raise UserError(f"held_out: {option!r}: {name} occurs twice; give it once")
        paths[name] = Path(path)
    return paths
