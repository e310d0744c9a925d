"""Splits: the training, validation and test documents of an indexed dataset.

Either shares such as 949,50,1 divide every dataset by the rule of Megatron-core or of older
forks; or a part of a dataset is named directly: 0.95:1.
"""

import difflib
import math
import re
from typing import Literal

from tokamake.config.fields import split_fractions
from tokamake.errors import UserError

NAMES = ("train", "valid", "test")

SplitRule = Literal["megatron_core", "megatron_deepspeed"]
"""How shares become documents: rounded bounds, or rounded counts as in forks of Megatron."""

FractionRange = tuple[float, float]
"""Begin and end of a part of a dataset, as fractions of its documents, 0 to 1."""

WHOLE: FractionRange = (0.0, 1.0)

FEWEST_DOCUMENTS, FEWEST_TOKENS = 100, 50_000
"""In a smaller test split, chance decides between models: a loss is wrong by a tenth or more."""

_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*")
NAMING = "a split's name has letters, digits, dots and underscores"


def shares(text: str) -> list[float]:
    """Normalize a split such as "949,50,1" to shares that add up to 1."""
    try:
        return split_fractions(text)
    except ValueError as error:
        raise UserError(f"split: {text!r}: {error}") from None


def document_ranges(
    text: str, num_documents: int, *, rule: SplitRule = "megatron_core"
) -> dict[str, range]:
    """Return the documents of each split by name; a split may be empty.

    The splits are contiguous, in order, and cover all documents. `megatron_core` rounds every
    cumulative share to a bound. `megatron_deepspeed` (Megatron-LM before megatron-core,
    Megatron-DeepSpeed and other forks) rounds the number of documents of every split, then shifts
    all bounds except the first by the excess. In a short dataset it may give a document to a split
    with share 0.
    """
    bounds = [0]
    if rule == "megatron_core":
        cumulative = 0.0
        for share in shares(text):
            cumulative += share
            bounds.append(round(cumulative * num_documents))
    else:
        for share in shares(text):
            bounds.append(bounds[-1] + round(share * num_documents))
        excess = bounds[-1] - num_documents
        # The forks' bounds can be below 0, which would select documents from the end.
        bounds = [0, *(max(0, bound - excess) for bound in bounds[1:])]
    return {name: range(*bounds[index : index + 2]) for index, name in enumerate(NAMES)}


def part_range(part: FractionRange, num_documents: int) -> range:
    """Return the documents of a part; adjacent parts have no gap and no overlap."""
    return range(*(round(bound * num_documents) for bound in part))


def training_documents(part: FractionRange | None, text: str | None, num_documents: int) -> range:
    """Return the training documents: of a part, of a split, or all documents."""
    if part:
        return part_range(part, num_documents)
    return document_ranges(text, num_documents)["train"] if text else range(num_documents)


def is_split_name(name: str) -> bool:
    """Whether a split may have this name; the name becomes part of file names."""
    return bool(_SPLIT_NAME.fullmatch(name)) and not name.casefold().endswith(".json")


def parse_part(text: str) -> FractionRange:
    """Parse a part of a dataset such as "0.9:1"; UserError if not two ascending numbers in 0..1."""
    try:
        begin, end = (float(bound) for bound in text.split(":"))
    except ValueError:
        begin, end = math.nan, math.nan
    if not 0 <= begin < end <= 1:
        raise UserError(f"{text!r}: give a part of the documents, START:END from 0 to 1")
    return begin, end


def parse_splits(text: str) -> dict[str, FractionRange]:
    """Parse the splits of a corpus: "train=0:0.95 valid=0.95:1 hard"; `hard` is all of it."""
    splits: dict[str, FractionRange] = {}
    for word in text.split():
        name, equals, part = word.partition("=")
        if not is_split_name(name):
            raise UserError(f"{word!r}: write NAME or NAME=START:END; {NAMING}")
        if name.casefold() in map(str.casefold, splits):
            raise UserError(f"{word!r}: {name} is repeated; give each split once")
        # "trian=0:0.9" would silently be a validation split.
        if name != "train" and difflib.get_close_matches(name.casefold(), ["train"], cutoff=0.8):
            raise UserError(f"{word!r}: a validation split; did you mean train? If not, rename it")
        splits[name] = parse_part(part) if equals else WHOLE
    return splits
