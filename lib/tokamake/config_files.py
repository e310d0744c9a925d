"""Validation of YAML files and tables against Pydantic models, with one line per mistake."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tokamake.errors import UserError, nearest

Model = TypeVar("Model", bound=BaseModel)

_MAX_DEPTH = 100
"""Levels of a YAML document."""
_MAX_VALUES = 1_000_000
"""Values of a YAML document, each time that an alias repeats them."""
_MAX_SHOWN = 200
"""Characters of a value that a message shows."""


def validate(
    model: type[Model], value: Any, where: str, *, context: dict[str, Any] | None = None
) -> Model:
    """Validate `value` against a model; errors are lines with file, key, value and remedy."""
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        raise _user_error(error, model, where=where) from None


def parse_json(kind: Any, text: str, *, where: str) -> Any:
    """Validate JSON text against a model or type. Errors as in `validate`."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else BaseModel
        raise _user_error(error, model, where=where) from None


def _user_error(error: ValidationError, model: type[BaseModel], *, where: str) -> UserError:
    return UserError("\n".join(_explain(model, item, where=where) for item in error.errors()))


def _explain(model: type[BaseModel], item: Any, *, where: str) -> str:
    shown = "" if isinstance(item["input"], dict | BaseModel) else f" {_shown(item['input'])}:"
    location = item["loc"]
    is_item = location and isinstance(location[-1], int) and item["type"] != "invalid_key"
    if shown and is_item:
        location = location[:-1]  # the value identifies the item of a list
    path = ".".join(map(str, location))
    message = item["msg"].removeprefix("Value error, ")
    if isinstance(item["input"], str) and message.startswith(f"{item['input']}: "):
        shown = f" {item['input']}:"  # a plug-in that a name alone asks for
        message = message.removeprefix(f"{item['input']}: ")
    if item["type"] == "extra_forbidden":
        keys = [*_section(model, item["loc"][:-1]).model_fields]
        prefix = "".join(f"{part}." for part in item["loc"][:-1])
        return f"{where}: {prefix}{unknown_key(str(item['loc'][-1]), keys, paths=[*_paths(model)])}"
    if item["type"] == "invalid_key":
        # YAML reads {split: 98,1,1} as three keys.
        return (
            f"{where}: {path}: a number is no key; quote text with commas in braces, as in "
            '{split: "98,1,1"}'
        )
    if item["type"] == "model_type" and path:
        settings = ", ".join(_section(model, item["loc"]).model_fields)
        return f"{where}: {path}:{shown} not a section; give its settings: {settings}"
    if item["type"] == "dict_type" and path:
        return f"{where}: {path}:{shown} not a section; give keys with values"
    if item["type"] in {"tuple_type", "list_type"}:
        return f"{where}: {path}:{shown} not a list; write it in brackets, as in [a, b]"
    if item["type"] == "missing":
        return f"{where}: {path}: missing; add it"
    if item["type"] == "int_parsing" and (number := _without_unit(str(item["input"]))):
        return f"{where}: {path}:{shown} a number has no unit here; write {number}"
    if not path:
        return f"{where}:{shown} {_uncapitalized(message)}"
    field = _section(model, location[:-1]).model_fields.get(str(location[-1]))
    if field and item["type"] in _NO_INTEGER:
        message = _integer_remedy(field) or message
    # The message of a section's validator begins with a key: `train` and `zero_stage: 3: ...`.
    key = re.match(r"\w*", message)
    if item["input"] == 0 and field and " off" in (field.description or ""):
        return f"{where}: {path}:{shown} {_uncapitalized(message)} ({field.description})"
    if not shown and key and key[0] in _section(model, item["loc"]).model_fields:
        return f"{where}: {path}.{message}"
    return f"{where}: {path}:{shown} {_uncapitalized(message)}"


_NO_INTEGER = {"int_parsing", "int_type", "int_from_float", "greater_than_equal"}
"""Types of Pydantic's errors about integers."""


def _integer_remedy(field: FieldInfo) -> str:
    """Remedy for a setting that is an integer, with or without a lower bound; else empty."""
    members = get_args(field.annotation) or (field.annotation,)
    kinds = [each for each in members if each is not NoneType]
    kind, *notes = get_args(kinds[0]) or kinds[:1]
    limits = [*field.metadata, *(each for note in notes for each in getattr(note, "metadata", ()))]
    least = [limit.ge for limit in limits if hasattr(limit, "ge")]
    if len(kinds) != 1 or kind is not int or len(least) != len(limits):
        return ""
    bound = f" of {least[0]} or more" if least else ""
    return f"give an integer{bound}" + (", or null" if NoneType in members else "")


def _without_unit(text: str) -> int:
    """The whole number that `100MB`, `64KiB` or `2k` means; 0 for other texts."""
    match = re.fullmatch(r"(\d+)\s*([kKMGT])(i?)B?", text.strip())
    if match is None:
        return 0
    return int(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1)


def _uncapitalized(message: str) -> str:
    """Begin a message with a small letter, unless it begins with an acronym or a variable."""
    is_name = message[:2].isalpha() and message[:2].isupper()
    return message if is_name else f"{message[0].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def unknown_key(key: str, known: list[str], *, paths: Iterable[str] = ()) -> str:
    """Message about an unknown key; it names the nearest ones, also of other sections (`paths`)."""
    elsewhere = [path for path in paths if path.rpartition(".")[2] == key]
    listed = f"this section knows {', '.join(known)}"
    return f"{key}: unknown key; {nearest(key, known, first=elsewhere) or listed}"


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings; keys of mappings are the user's."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        section = None if get_origin(field.annotation) is dict else _model_in(field.annotation)
        if section:
            yield from _paths(section, f"{prefix}{name}.")


def _section(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel]:
    """Return the section at `location`. Names that are not fields are keys of mappings."""
    for part in location:
        if field := model.model_fields.get(str(part)):
            model = _model_in(field.annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)


def read_yaml(path: Path, remedy: str) -> Any:
    """Read a YAML file without duplicate keys; if it is missing, the message ends with `remedy`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {remedy}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder; name the file in it") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, path: str) -> Any:
    """Parse YAML, which must not have a key twice in one section."""
    import yaml

    # The loader in C is ten times faster; PyYAML may be installed without it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _refuse_deep_nesting(text, path)
        opened = loader(text)
        try:
            node = opened.get_single_node()
            _refuse_duplicate_keys(node, path)
            value = None if node is None else opened.construct_document(node)
        finally:
            opened.dispose()
    except yaml.MarkedYAMLError as error:
        raise UserError(_syntax_error(error, text.splitlines(), path=path)) from None
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        # A character that YAML does not allow, or a value such as 2026-13-45 that is no date.
        is_value = isinstance(error, yaml.YAMLError | ValueError)
        reason = str(error) if is_value else "a value does not fit its tag"
        reason = " ".join(reason.split())[:_MAX_SHOWN]
        raise UserError(f"{path}: not valid YAML ({reason}); fix it, or quote the value") from None
    if _num_values(value) > _MAX_VALUES:
        raise UserError(f"{path}: its aliases (*) make more than {_MAX_VALUES:,} values; fix it")
    return value


def _refuse_deep_nesting(text: str, path: str) -> None:
    """Check the depth of a document before it is built: libyaml overflows the stack there."""
    import yaml

    indents = max((len(line) - len(line.lstrip(" -?:")) for line in text.splitlines()), default=0)
    if text.count("[") + text.count("{") + indents <= _MAX_DEPTH:
        return
    depth, loader = 0, getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for event in yaml.parse(text, loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            line = f":{event.start_mark.line + 1}" if event.start_mark else ""
            raise UserError(f"{path}{line}: more than {_MAX_DEPTH} levels; fix it")


def _num_values(value: Any, known: dict[int, int] | None = None) -> int:
    """Number of values in a document; repeated ones (aliases) count each time."""
    known = {} if known is None else known
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = 1  # an alias may name its own section
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_num_values(item, known) for item in items)
    return known[id(value)]


def _syntax_error(error: Any, lines: list[str], *, path: str) -> str:
    mark = error.problem_mark or error.context_mark
    number = min(mark.line + 1, len(lines))  # the end of the file is after its last line
    line = lines[number - 1] if lines else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"{path}:{number}: indented with a tab; YAML needs spaces, replace the tab"
    # The parser finds some mistakes, such as an open bracket, only in a later line.
    is_late = number > 1 and "expected" in error.problem
    remedy = "fix this line or one before it" if is_late else "fix it"
    return f"{path}:{number}: not valid YAML ({error.problem}); {remedy}"


def _refuse_duplicate_keys(root: Any, path: str) -> None:
    """Check that no mapping has a key twice; PyYAML silently keeps the last value."""
    import yaml

    nodes, visited = [root], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.ScalarNode) or node is None or id(node) in visited:
            continue
        visited.add(id(node))  # an alias leads to a node that was checked before
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            nodes.append(value)
            # `<<` merges another mapping and may be repeated.
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                raise UserError(
                    f"{path}:{line}: {key.value}: is in line {lines[name]}, too; keep one of them"
                )
            lines[name] = line


_ONE_TAB = "separate columns with one tab, not spaces"


class Table(NamedTuple):
    """A table with its line numbers."""

    header: int
    columns: list[str]
    rows: dict[int, dict[str, str]]
    """Line number → column → cell, without empty cells."""


def read_table(path: Path, *, setting: str, row: str) -> Table:
    """Read a tab-separated table with a header. Lines that begin with `#` are comments.

    `setting`, which names the table, and `row`, a noun, are for messages.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UserError(f"{path}: {reason}; fix {setting} in the config") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the table as UTF-8") from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    cells = {number: [cell.strip() for cell in line.split("\t")] for number, line in numbered}
    if len(cells) < 2:
        raise UserError(f"{path}: no {row}; add a header and one tab-separated row per {row}")
    (header, columns), *rows = cells.items()
    for column in columns:
        if len(column.split()) > 1:  # no column's name has a space
            raise UserError(f"{path}:{header}: {column}: spaces between columns; {_ONE_TAB}")
    for number, values in rows:
        if len(values) != len(columns):
            noun = "column" if len(values) == 1 else "columns"
            counts = f"{len(values)} {noun}, the header has {len(columns)}"
            spaces = next((cell for cell in values if "  " in cell), None)
            if spaces is None and len(" ".join(values).split()) == len(columns):
                spaces = next(cell for cell in values if " " in cell)
            cause = f" ({spaces!r} has spaces, not a tab)" if spaces else ""
            raise UserError(f"{path}:{number}: {counts}{cause}; {_ONE_TAB}")
    filled = {
        number: {key: cell for key, cell in zip(columns, values, strict=True) if cell}
        for number, values in rows
    }
    return Table(header, columns, filled)
