"""Local data of lm-eval's tasks: files and fields that their YAML files name.

lm-eval is not imported: a dry run reads only the YAML files of the folder `include`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import yaml

from tokamake.errors import UserError

_BUILDERS = ("json", "csv", "text", "parquet", "arrow")
"""Values of dataset_path by which `datasets` reads files."""


class _Loader(yaml.SafeLoader):
    """Reads names of Python functions as nothing."""


_Loader.add_multi_constructor("!", lambda *_: None)


def evaluation_sets(names: list[str], include: Path) -> dict[str, dict[str, Any]]:
    """Return the files and fields of tasks, groups or tags: the name of each task → both.

    Fields are the ones of doc_to_text, the question.

    Raises:
        UserError: a YAML file cannot be read, or a task names no local files or no fields.
    """
    try:
        tasks = dict(_read(include))
        members = [name for wanted in names for name in _members(wanted, tasks)]
    except RecursionError:
        raise UserError(f"{include}: files or groups contain themselves; fix it") from None
    return {
        name: {"path": _files(tasks[name], name), "fields": _fields(tasks[name], name)}
        for name in members
    }


def _members(name: str, tasks: Mapping[str, dict[str, Any]]) -> list[str]:
    """Names of the tasks of a task, group or tag."""
    if name in tasks and "group" not in tasks[name]:
        return [name]
    subtasks = _listed(tasks[name]["task"]) if name in tasks else []
    members = [member for each in subtasks for member in _members(str(each), tasks)]
    members += [each for each, task in tasks.items() if name in _listed(task.get("tag"))]
    if not members:
        raise UserError(
            f"task {name} of lm-eval has no YAML file in `include`, so its data are not known to "
            "be local; name local copies of them in `files`"
        )
    return members


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and settings of the tasks and groups in the YAML files of a folder."""
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        task = _read_file(path)
        name = task.get("group") or task.get("task")
        if isinstance(name, str) and task.get("task"):
            yield name, task


def _read_file(path: Path) -> dict[str, Any]:
    """A YAML file, with the settings of the file that it includes."""
    try:
        task = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        reason = "no such file" if is_missing else error.strerror
        raise UserError(f"{path}: {reason}; fix `include` of the task") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a YAML file ({reason}); fix it") from None
    if not isinstance(task, dict):
        return {}
    base = task.pop("include", None)
    return {**(_read_file(path.parent / base) if isinstance(base, str) else {}), **task}


def _files(task: Mapping[str, Any], name: str) -> list[str]:
    """Files of the splits on which lm-eval scores a task."""
    data = (task.get("dataset_kwargs") or {}).get("data_files")
    if task.get("dataset_path") not in _BUILDERS or not data:
        raise UserError(
            f"task {name} of lm-eval has no local files: dataset_path is "
            f"{task.get('dataset_path')}; name local copies of its data in `files`"
        )
    if isinstance(data, dict):
        splits = [split for key in ("test", "validation") if (split := task.get(f"{key}_split"))]
        data = [file for split in splits or data for file in _listed(data.get(split, []))]
    return [str(file) for file in _listed(data)]


def _fields(task: Mapping[str, Any], name: str) -> list[str]:
    """Fields of doc_to_text; of doc_to_target if there are none, as in tasks of perplexity."""
    if task.get("dataset_path") == "text":
        return ["text"]
    for key in ("doc_to_text", "doc_to_target"):
        try:
            if fields := _names(task.get(key)):
                return fields
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"task {name} of lm-eval: {key}: {error}; fix it") from None
    raise UserError(
        f"task {name} of lm-eval: doc_to_text names no field; name the task's files and fields in "
        "`files`"
    )


def _names(template: Any) -> list[str]:
    """Fields of a template of Jinja, in order; a template without braces is a field's name."""
    if not isinstance(template, str):
        return []
    if "{" not in template:
        return [template] if template else []
    parsed = jinja2.Environment().parse(template)
    return sorted(jinja2.meta.find_undeclared_variables(parsed), key=template.index)
