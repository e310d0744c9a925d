"""Each format states the constants of `CheckpointFormat`, and mypy checks its functions."""

from pathlib import Path

import pytest

from tokamake import plugins
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import load_format
from tokamake.config.model import (
    FORMATS,
    format_names,
    format_sizes,
    formats_with,
    formats_with_tokenizer,
)

CONSTANTS = (
    *("TITLE", "SUMMARY", "PRIORITY", "SIZES", "EQUAL_STAGES", "DTYPE", "TOKENIZER_CONFIG"),
    *("IN_ROOT", "STEP_FOLDER", "POINTER", "NUMBERED_FOLDER", "NEAR_MISSES"),
)


@pytest.mark.parametrize("name", plugins.names(FORMATS))
def test_each_format_is_checked_against_the_protocol(name: str) -> None:
    source = Path(str(load_format(name).__file__)).read_text()
    assert "_: CheckpointFormat = this_module" in source
    module = load_format(name)
    for constant in CONSTANTS:
        stated = getattr(module, constant, "")
        assert plugins.constant(FORMATS, name, constant, default="") == stated


def test_formats_have_distinct_priorities() -> None:
    names = plugins.names(FORMATS)
    assert len({plugins.constant(FORMATS, name, "PRIORITY") for name in names}) == len(names)


def test_the_help_of_convert_has_the_summaries_of_all_formats() -> None:
    help_text = " ".join((convert.__doc__ or "").split())
    for name in plugins.names(FORMATS):
        summary = plugins.constant(FORMATS, name, "SUMMARY")
        assert f"{name.replace('_', '-')} ({summary})" in help_text


def test_names_and_sizes_come_from_the_folders_of_formats() -> None:
    assert set(format_names()) == {
        "hf", "mds", "mds-pipeline", "megatron", "native", "torch-dist", "universal"
    }  # fmt: skip
    assert format_sizes("hf") == {}
    assert formats_with("zero_stage") == ["mds", "mds-pipeline", "megatron"]
    assert formats_with_tokenizer() == ["hf"]
