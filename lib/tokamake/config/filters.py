"""Filters of documents in the config: a list of names, each with its options.

A filter is a file of `data/filters`, an entry point of the group `tokamake.filters`, or the path of
a Python file. `tokamake.data.filters` lists the names that the file defines.
"""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from tokamake import files
from tokamake.config.external_plugins import PlugInKind, file_hash
from tokamake.config.fields import Settings
from tokamake.config.tasks import TaskSettings
from tokamake.config_files import parse_yaml, validate
from tokamake.errors import UserError

_KIND = PlugInKind("filter", "data/filters", extra="corpora", external="a path ending in .py")


def filter_class(name: str) -> Any:
    """Return the class of a filter: an external one is a class, or a module with one."""
    loaded = _KIND.load(name)
    loaded = getattr(loaded, "Filter", loaded)
    if not (isinstance(loaded, type) and issubclass(loaded, Settings) and hasattr(loaded, "apply")):
        raise UserError(f"{name}: has no class Filter, derived from DocumentFilter; add it")
    return loaded


def source_digest(name: str, options: Mapping[str, Any]) -> str:
    """Return a hash of the files that a filter depends on beside its options; empty: none.

    These are the source file of an external filter, and the files that a filter reads.
    """
    loaded = filter_class(name)
    paths = [*_KIND.source(name, loaded), *getattr(loaded(**options), "input_files", ())]
    hashes = [file_hash(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else files.digest(hashes) if hashes else ""


def complete_filters(
    entries: Iterable[Mapping[str, Mapping[str, Any]]], tasks: Mapping[str, TaskSettings]
) -> "Filters":
    """Return filters whose options name no tasks of the config any more, but their files."""
    return tuple(
        {
            name: dict(with_tasks(options, tasks))
            if (with_tasks := getattr(filter_class(name), "with_tasks", None))
            else dict(options)
            for name, options in entry.items()
        }
        for entry in entries
    )


def check_filter_packages(entries: Iterable[Mapping[str, Any]]) -> None:
    """Check that the packages of filters are installed."""
    for name in (name for entry in entries for name in entry):
        if fault := _KIND.missing_packages(name, filter_class(name)):
            raise UserError(f"filters: {fault}, or remove the filter")


def check_filter_inputs(entries: Iterable[Mapping[str, Mapping[str, Any]]]) -> None:
    """Check the files that filters read, as far as a dry run does it."""
    for name, options in (each for entry in entries for each in entry.items()):
        try:
            if check := getattr(filter_class(name)(**options), "check_inputs", None):
                check()
        except UserError as error:
            raise UserError(f"filters: {name}: {error}") from None


def reads_metadata(entries: Iterable[Mapping[str, Mapping[str, Any]]]) -> bool:
    """Whether filters look at other fields than the text: equal texts may have two verdicts."""
    entries = [*entries]
    named = (_metadata_keys(*each) for entry in entries for each in entry.items())
    return any(named) or bool(unnamed_metadata(entries))


def unnamed_metadata(entries: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Names of external filters whose source reads `metadata`, but whose `metadata_keys` are empty.

    Readers of tables skip columns that no filter names.
    """
    return [
        name
        for entry in entries
        for name, options in entry.items()
        if not _metadata_keys(name, options)
        and any(map(_mentions_metadata, _KIND.source(name, filter_class(name))))
    ]


def _metadata_keys(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(getattr(filter_class(name)(**options), "metadata_keys", ()))


@cache
def _mentions_metadata(path: Path) -> bool:
    if path.suffix != ".py":  # an entry point may be compiled
        return False
    nodes = ast.walk(ast.parse(path.read_bytes()))
    return any(isinstance(node, ast.Attribute) and node.attr == "metadata" for node in nodes)


def _checked(name: str, options: dict[str, Any]) -> dict[str, Any]:
    # Without defaults, so that a new option of a filter leaves finished shards as they are.
    checked = validate(filter_class(name), options, name)
    return checked.model_dump(mode="json", exclude_unset=True)


def _entry(value: Any) -> dict[str, dict[str, Any]]:
    """Check a filter: {length: {min_characters: 200}}, {language: en}, or a name alone."""
    return _KIND.check_entry(value, find=filter_class, check=_checked)


def _entries(value: Any) -> Any:
    """Parse text, as in a cell of the table of corpora: YAML with or without brackets."""
    if not isinstance(value, str):
        return value
    text = value if value.lstrip().startswith("[") else f"[{value}]"
    try:
        return parse_yaml(text, "filters")
    except UserError as error:
        raise ValueError(f"{error}; write NAME: {{OPTION: VALUE}}, NAME: ...") from None


FilterEntry = Annotated[dict[str, dict[str, Any]], BeforeValidator(_entry)]
"""Name of a filter → its options, in a mapping of one key."""
Filters = Annotated[tuple[FilterEntry, ...], BeforeValidator(_entries)]
"""Filters in the order in which they see a document."""


class _FilterOption(Settings):
    """The option --filters of the commands that tokenize."""

    filters: Filters
    """The same as in the config."""


def parse_filters(text: str) -> Filters:
    """Parse the option --filters: YAML or JSON, as in a cell of the table of corpora."""
    return validate(_FilterOption, {"filters": text}, "--filters").filters if text else ()
