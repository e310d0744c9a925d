"""What settings are made of: their base class, and kinds of values that several sections share."""

import functools
import math
import operator
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tokamake import plugins

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._]*$")]
"""A word that becomes part of a file name; no hyphen, since `-` sets off a merged file's number."""


def plug_in(folder: str, *, optional: bool = False) -> AfterValidator:
    """Check that a field names a plug-in of a folder, or is empty where it is `optional`."""

    def known(name: str) -> str:
        if name not in plugins.names(folder) and (name or not optional):
            raise ValueError(f"unknown name; choose one of {', '.join(plugins.names(folder))}")
        return name

    return AfterValidator(known)


def split_shares(text: str) -> list[float]:
    """Normalize a split such as "949,50,1" to shares that add up to 1.

    Raises:
        ValueError: not three finite numbers, one is negative, or all are zero.
    """
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    # Not sum(): that compensates rounding since Python 3.12, and Megatron's does not.
    whole = functools.reduce(operator.add, parts, 0.0)
    if len(parts) != 3 or not min(parts) >= 0 or not 0 < whole < math.inf:
        raise ValueError('give three non-negative numbers, train,valid,test, as in "949,50,1"')
    return [part / whole for part in parts]


def _split(text: str) -> str:
    split_shares(text)
    return text


Split = Annotated[str, AfterValidator(_split)]
"""Shares as `split_shares` takes them."""


class Settings(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )
