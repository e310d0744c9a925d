"""Filters of documents in the config: a list of names, each with its options.

A filter is a file of `data/filters`, an entry point of the group `tokamake.filters`, or the path of
a Python file. `tokamake.data.filters` lists the names that the file defines.
"""

import inspect
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from tokamake import files, plugins
from tokamake.config.external_files import file_hash, import_file
from tokamake.config.fields import Settings
from tokamake.config.tasks import TaskSettings
from tokamake.config_files import parse_yaml, validate
from tokamake.errors import UserError

_FOLDER = "data/filters"
_GROUP = "tokamake.filters"


def filter_class(name: str) -> Any:
    """Return the class of a filter by its name in the config."""
    if name.endswith(".py"):
        return _checked(import_file(name, noun="filters"), name)
    if name in plugins.names(_FOLDER):
        return plugins.load(_FOLDER, name).Filter
    external = {entry.name: entry for entry in entry_points(group=_GROUP)}
    if name not in external:
        known = ", ".join([*plugins.names(_FOLDER), *external])
        raise UserError(f"{name}: unknown filter; choose one of {known}, or a path ending in .py")
    try:
        return _checked(external[name].load(), name)
    except ImportError as error:
        raise UserError(f"{name}: cannot be imported ({error}); install its package") from None


def _checked(loaded: Any, name: str) -> Any:
    """Return the class of an external filter: an entry point is a class, or a module with one."""
    loaded = getattr(loaded, "Filter", loaded)
    if not (isinstance(loaded, type) and issubclass(loaded, Settings) and hasattr(loaded, "apply")):
        raise UserError(f"{name}: has no class Filter, derived from DocumentFilter; add it")
    return loaded


def source_digest(name: str, options: Mapping[str, Any]) -> str:
    """Return a hash of the files that a filter depends on beside its options; empty: none.

    These are the source file of an external filter, and the files that a filter reads.
    """
    loaded = filter_class(name)
    hashes = [file_hash(path) for path in getattr(loaded(**options), "input_files", ())]
    if name not in plugins.names(_FOLDER):
        source = name if name.endswith(".py") else inspect.getsourcefile(loaded)
        hashes.insert(0, file_hash(Path(source or "")))
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
        packages = getattr(filter_class(name), "packages", ())
        if missing := [package for package in packages if find_spec(package) is None]:
            is_own = name in plugins.names(_FOLDER)
            remedy = "run `pip install 'tokamake[corpora]'`" if is_own else "install it"
            raise UserError(
                f"filters: {name}: needs {', '.join(missing)}, which this Python environment "
                f"lacks; {remedy}, or remove the filter"
            )


def check_filter_inputs(entries: Iterable[Mapping[str, Mapping[str, Any]]]) -> None:
    """Check the files that filters read, as far as a dry run does it."""
    for name, options in (each for entry in entries for each in entry.items()):
        try:
            if check := getattr(filter_class(name)(**options), "check_inputs", None):
                check()
        except UserError as error:
            raise UserError(f"filters: {name}: {error}") from None


def _entry(value: Any) -> dict[str, dict[str, Any]]:
    """Check a filter: {length: {min_characters: 200}}, {language: en}, or a name alone."""
    value = {value: None} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(f"{value!r}: give a filter as NAME: {{OPTION: VALUE}}")
    (name, options), *_ = value.items()
    options = {} if options is None else options
    try:
        loaded = filter_class(str(name))
        if not isinstance(options, Mapping):
            if not (bare := getattr(loaded, "bare_option", "")):
                raise ValueError(f"{name}: {options!r}: give options as {{OPTION: VALUE}}")
            options = {bare: options}
        checked = validate(loaded, options, str(name))
    except UserError as error:
        raise ValueError(str(error).replace("\n", "; ")) from None
    # Without defaults, so that a new option of a filter leaves finished shards as they are.
    return {str(name): checked.model_dump(mode="json", exclude_unset=True)}


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
