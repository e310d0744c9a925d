"""Which documents of a file train, which validate, which are kept for tests.

Either one rule parts every file, Megatron's of today or that of its forks; or a part of a file is
named as it stands: 0.95:1.
"""

import difflib
import math
import re
from typing import Literal

from tokamake.config.fields import split_shares
from tokamake.errors import UserError

NAMES = ("train", "valid", "test")

Rule = Literal["megatron_core", "megatron_deepspeed"]
"""How shares become documents: by rounded bounds, or by rounded parts as forks of Megatron do."""

Part = tuple[float, float]
"""Where a part of a file begins and ends, as shares of its documents, 0 to 1."""

WHOLE: Part = (0.0, 1.0)

_SET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*")
NAMING = "a set's name has letters, digits, dots and underscores"


def shares(text: str) -> list[float]:
    """Normalize a split such as "949,50,1" to shares that add up to 1.

    Raises:
        UserError: not three finite numbers, one is negative, or all are zero.
    """
    try:
        return split_shares(text)
    except ValueError as error:
        raise UserError(f"split: {text!r}: {error}") from None


def document_ranges(
    text: str, num_documents: int, rule: Rule = "megatron_core"
) -> dict[str, range]:
    """Documents of each split, by name; together all documents, in order, some perhaps none.

    megatron_core rounds every cumulative share to a bound. megatron_deepspeed (Megatron-LM before
    its core, Megatron-DeepSpeed and other forks) rounds every part, and moves all bounds but the
    first by what is too much in the end; of a short file it may give a document to a split whose
    share is 0.

    Raises:
        UserError: `text` is not a split.
    """
    bounds = [0]
    if rule == "megatron_core":
        whole = 0.0
        for share in shares(text):
            whole += share
            bounds.append(round(whole * num_documents))
    else:
        for share in shares(text):
            bounds.append(bounds[-1] + round(share * num_documents))
        excess = bounds[-1] - num_documents
        # Below 0 the forks would count documents from the end.
        bounds = [0, *(max(0, bound - excess) for bound in bounds[1:])]
    return {name: range(*bounds[n : n + 2]) for n, name in enumerate(NAMES)}


def part_range(part: Part, num_documents: int) -> range:
    """Documents of a part; parts that share a bound share no document and leave out none."""
    return range(*(round(bound * num_documents) for bound in part))


def trained(part: Part | None, text: str | None, num_documents: int) -> range:
    """Documents that train: of a part, or of what a split leaves, or all."""
    if part:
        return part_range(part, num_documents)
    return document_ranges(text, num_documents)["train"] if text else range(num_documents)


def is_set_name(name: str) -> bool:
    """Whether a set of documents may be called so: the name becomes part of file names."""
    return bool(_SET.fullmatch(name)) and not name.casefold().endswith(".json")


def parse_part(text: str) -> Part:
    """Read a part of a file, "0.9:1".

    Raises:
        UserError: not two ascending numbers from 0 to 1.
    """
    try:
        begin, end = (float(bound) for bound in text.split(":"))
    except ValueError:
        begin, end = math.nan, math.nan
    if not 0 <= begin < end <= 1:
        raise UserError(f"{text!r}: give a part of the documents, START:END from 0 to 1")
    return begin, end


def parse_sets(text: str) -> dict[str, Part]:
    """Read what sets a corpus is part of: "train=0:0.95 valid=0.95:1 hard" (all of it).

    Raises:
        UserError: a set has no name or comes twice, or its part is none.
    """
    sets: dict[str, Part] = {}
    for word in text.split():
        name, equals, part = word.partition("=")
        if not is_set_name(name):
            raise UserError(f"{word!r}: write NAME or NAME=START:END; {NAMING}")
        if name.casefold() in map(str.casefold, sets):
            raise UserError(f"{word!r}: {name} stands twice; give each set once")
        if name != "train" and difflib.get_close_matches(name.casefold(), ["train"], cutoff=0.8):
            raise UserError(f"{word!r}: a validation set; did you mean train? Else rename it")
        sets[name] = parse_part(part) if equals else WHOLE
    return sets
