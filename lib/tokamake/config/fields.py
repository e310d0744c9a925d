"""Base class of all config sections, and field types that several sections share."""

import functools
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from tokamake import plugins
from tokamake.errors import UserError, choice
from tokamake.remote.addresses import is_remote


@dataclass(frozen=True)
class Matching:
    """Validator of a text that matches a regular expression. Its error says it in words."""

    pattern: str
    words: str
    """Texts that match: "letters, digits or _"."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.pattern}

    def _check(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise ValueError(f"give {self.words}")
        return text


Name = Annotated[
    str,
    Matching(
        r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        "letters, digits, '.', '_' or '-', the first one a letter or digit",
    ),
]
"""Word that becomes part of a file name."""
Key = Annotated[
    str,
    Matching(
        r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        "letters, digits, '_' or '-', the first one a letter or digit",
    ),
]
"""Name that is a key in results, and part of a file name without a suffix."""
InferenceDtype = Literal["fp32", "bf16", "fp16"]
"""Dtype of weights and computation of a job that does not train."""


FETCH = {"fetch": True}
"""Context of a validation that downloads the tokenizer and the config of a model by its address."""


def local_path(value: Any, info: ValidationInfo, *, tokenizer_only: bool) -> Any:
    """Replace an address by the path of its downloaded files; other values stay.

    In the context `FETCH`, files that are missing are downloaded.
    """
    if isinstance(value, str) and is_remote(value):
        # Modules of the network take longer to import than the config takes to be checked.
        from tokamake.remote.local_copy import local_copy

        try:
            is_online = bool((info.context or {}).get("fetch"))
            return local_copy(value, tokenizer_only=tokenizer_only, online=is_online)
        except UserError as error:
            raise ValueError(str(error).removeprefix(f"{value}: ")) from None
    return value


def _tokenizer_path(value: Any, info: ValidationInfo) -> Any:
    return local_path(value, info, tokenizer_only=True)


TokenizerPath = Annotated[Path, BeforeValidator(_tokenizer_path)]
"""Path of a tokenizer, or its address: hf:// or https://."""


def plug_in(folder: str, *, optional: bool = False) -> AfterValidator:
    """Validator: the field names a plug-in of `folder`, or is empty if `optional`."""

    def check_name(name: str) -> str:
        if name not in plugins.names(folder) and (name or not optional):
            raise ValueError(f"unknown name; {choice(name, plugins.names(folder))}")
        return name

    return AfterValidator(check_name)


def dotted(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name nested settings by their paths: `{"train": {"seed": 1}}` gives `{"train.seed": 1}`."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            named |= dotted(value, f"{prefix}{name}.")
        else:
            named[f"{prefix}{name}"] = value
    return named


def split_fractions(text: str) -> list[float]:
    """Normalize a split such as "949,50,1" to shares that add up to 1.

    The split "98,2" has no test documents, as in Megatron. A single number is refused: YAML reads
    {split: 98,1,1} as one.
    """
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    # Not sum(): it compensates rounding errors since Python 3.12; Megatron's sum does not.
    total = functools.reduce(operator.add, shares, 0.0)
    # The comparisons are False for NaN, so `not` refuses it.
    if len(shares) not in (2, 3) or not min(shares) >= 0 or not 0 < total < math.inf:
        raise ValueError(
            'give two or three non-negative numbers, train,valid,test, as in "98,2" or "949,50,1"'
        )
    return [share / total for share in (*shares, 0.0)[:3]]


def _join_shares(value: Any) -> Any:
    """A list of shares as text: [98, 1, 1] is "98,1,1"."""
    shares = [value] if isinstance(value, int) else value
    return ",".join(map(str, shares)) if isinstance(shares, list | tuple) else value


def _check_split(text: str) -> str:
    split_fractions(text)
    return text


Split = Annotated[
    str,
    BeforeValidator(_join_shares, json_schema_input_type=str | list[float]),
    AfterValidator(_check_split),
]
"""Shares of training, validation and test documents: text for `split_fractions`, or a list."""


class Settings(BaseModel):
    """Base class of all sections: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )
