"""Prompts of a file, with their toxicity."""

from pathlib import Path
from typing import NamedTuple

from tokamake.data.readers import BadRecord, open_input, value_of
from tokamake.errors import UserError


class Prompt(NamedTuple):
    """A prompt."""

    text: str
    toxicity: float | None
    """0 to 1; None: not known."""


def read_prompts(path: Path, *, key: str, toxicity_key: str = "") -> list[Prompt]:
    """Read the prompts of a raw file.

    Raises:
        UserError: the file is missing or empty, a record lacks a field, a prompt is blank, or a
            toxicity is not a number from 0 to 1.
    """
    prompts = []
    source = open_input(path)
    for block in source.blocks((key, toxicity_key) if toxicity_key else (key,)):
        for index, record in enumerate(block.records):
            try:
                prompts.append(_prompt(record, key=key, toxicity_key=toxicity_key))
            except ValueError as error:
                place = source.place(int(block.numbers[index]), int(block.offsets[index]))
                raise UserError(f"{place}: {error}") from None
    if not prompts:
        raise UserError(f"{path}: no prompts; give a file with a prompt in each line")
    return prompts


def _prompt(record: object, *, key: str, toxicity_key: str) -> Prompt:
    """Prompt of a record; raises ValueError, with the remedy."""
    if isinstance(record, BadRecord):
        raise ValueError(record.reason)
    try:
        text = value_of(record, key)
        toxicity = value_of(record, toxicity_key) if toxicity_key else None
    except KeyError as error:
        known = ", ".join(record) if isinstance(record, dict) else "none"
        raise ValueError(f"no field {error}; its fields are {known}: fix the keys") from None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"field {key} holds no prompt; fix the key or the file")
    if toxicity is None:
        return Prompt(text, None)
    if not isinstance(toxicity, int | float) or not 0 <= toxicity <= 1:
        raise ValueError(f"field {toxicity_key}: {toxicity!r} is not a number from 0 to 1")
    return Prompt(text, float(toxicity))
