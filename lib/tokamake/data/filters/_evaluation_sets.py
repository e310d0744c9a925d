"""Texts of evaluation sets, for the filter `decontaminate`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tokamake.config.fields import Settings
from tokamake.data.readers import BadRecord, expand, open_input, value_of
from tokamake.errors import UserError


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
    Field(min_length=1),
]
"""A name or a list of names."""


class EvaluationSet(Settings):
    """Files of an evaluation set, and the fields that hold its texts."""

    path: Names
    """Files, folders or patterns, of any raw format."""
    fields: Names = ("text",)
    """Fields or columns with a text, or with a list of texts, such as [question, answer]."""

    @property
    def paths(self) -> list[Path]:
        """The files; raises UserError if a name matches none."""
        return expand(self.path)


def _with_path(value: Any) -> Any:
    """Check sets by their names; a set is a section, or its files alone."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: {"path": files} if isinstance(files, str | list | tuple) else files
        for name, files in value.items()
    }


EvaluationSets = Annotated[dict[str, EvaluationSet], BeforeValidator(_with_path)]
"""Name of an evaluation set → its files."""


def read_items(evaluation_set: EvaluationSet) -> Iterator[list[str]]:
    """Yield the texts of each item of a set: of each field, and if there are several, of all.

    Raises:
        UserError: a file is missing or damaged, or an item lacks a field.
    """
    keys = evaluation_set.fields
    for path in evaluation_set.paths:
        source = open_input(path)
        for block in source.blocks(keys):
            for index, record in enumerate(block.records):
                try:
                    texts = [_text(record, key) for key in keys]
                except ValueError as error:
                    place = source.place(int(block.numbers[index]), int(block.offsets[index]))
                    raise UserError(f"{place}: {error}") from None
                yield texts if len(texts) == 1 else [*texts, "\n".join(texts)]


def _text(record: Any, key: str) -> str:
    """Text of a field; raises ValueError, with the remedy."""
    if isinstance(record, BadRecord):
        raise ValueError(record.reason)
    try:
        value = value_of(record, key)
    except KeyError:
        known = ", ".join(record) or "none"
        raise ValueError(f"no field {key}; its fields are {known}: fix `fields`") from None
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"field {key} holds neither a text nor a list of texts; fix `fields`")
    return "\n".join(texts)
