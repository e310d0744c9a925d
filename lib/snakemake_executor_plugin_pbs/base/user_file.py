"""The user file: values of a user for all rules and for each rule, and which are missing."""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError
from .settings import BatchSettings


@dataclass(frozen=True)
class UserFile:
    """Values of the user file."""

    path: Path
    common: Mapping[str, str]
    rules: Mapping[str, Mapping[str, str]]

    def value(self, rule: str, name: str) -> str | None:
        return self.rules.get(rule, {}).get(name, self.common.get(name))


def read_user_file(path: Path, known: tuple[str, ...]) -> UserFile:
    """Read the user file; a file that does not exist has no values."""
    if not path.exists():
        return UserFile(path, {}, {})
    try:
        common = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8; save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(common, dict):
        raise UserError(f"{path}: is not a mapping; write lines like account: PROJECT")
    rules = common.pop("rules", None) or {}
    if not isinstance(rules, dict):
        raise UserError(f"{path}: rules: is not a mapping of rule names to values")
    strings = _strings(f"{path}: ", common, known=known)
    by_rule = {
        rule: _strings(f"{path}: rules: {rule}: ", values, known=known)
        for rule, values in rules.items()
    }
    return UserFile(path, strings, by_rule)


def _strings(where: str, values: Any, *, known: tuple[str, ...]) -> dict[str, str]:
    if not isinstance(values, dict):
        raise UserError(f"{where}{values!r}: is not a mapping of names to values")
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{where}{name}: unknown; known are {', '.join(known)}, rules")
        if not isinstance(value, str | int):
            raise UserError(f"{where}{name}: {value!r}: must be a string")
    return {name: str(value) for name, value in values.items()}


def personal_value(
    name: str, resource: str, *, rule: str, resources: Mapping[str, Any], user: UserFile
) -> str:
    """Value of a job's resource, or else of the user file; an empty string if neither has it."""
    value = resources.get(resource)
    if value is None or value == "":
        value = user.value(rule, name)
    return str(value or "")


def required_names(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Parse the names of required values, such as `account queue filesystems`."""
    names = tuple(text.replace(",", " ").split())
    for name in names:
        if name not in known:
            raise UserError(f"required: {name!r}: unknown; known are {', '.join(known)}")
    return names


def misspelled_rules(user: UserFile, known: Collection[str]) -> list[str]:
    """Warnings about rules in the user file whose names are close to rules of the workflow.

    Other unknown names are no mistake: the file may serve several workflows.
    """
    close = {name: get_close_matches(name, known, n=1) for name in user.rules if name not in known}
    return [
        f"{user.path}: rules: {name}: no rule or group has this name; did you mean {matches[0]}?"
        for name, matches in close.items()
        if matches
    ]


def read_values(settings: BatchSettings) -> UserFile:
    """Values of the user file; they replace the site's values."""
    path = Path(os.path.expandvars(settings.user_file)).expanduser()
    user = read_user_file(path, settings.personal)
    return replace(user, common={**settings.site_values(), **user.common})


def missing_values(
    settings: BatchSettings, user: UserFile, *, jobs: Iterable[tuple[str, Mapping[str, Any]]]
) -> str:
    """Message about required values that no job resource or user file sets; empty: all are set."""
    required = required_names(settings.required, settings.personal)
    missing: dict[str, list[str]] = {}
    names = set()
    for job, resources in jobs:
        names.add(job)
        for name in required:
            resource = settings.resource_names.get(name, name)
            if not personal_value(name, resource, rule=job, resources=resources, user=user):
                missing.setdefault(name, []).append(job)
    if not missing:
        return ""
    affected = sorted(set().union(*missing.values()))
    scope = f" for {', '.join(affected)}" if len(affected) < len(names) else ""
    lines = " and ".join(f"`{name}: ...`" for name in missing)
    return (
        f"{user.path}: no {', '.join(missing)}{scope}, which this site requires; write {lines} "
        "into that file, at the top for all jobs or below `rules:` and the name of a rule or group"
    )


def missing_in_workflow(resources: Mapping[str, Any]) -> str:
    """Message about required values that no rule of a workflow has; it also works in a dry run.

    The rules that will run, and their groups, are not known yet. So a value of one rule counts for
    all rules: `resources` has them together. The executor checks the jobs of a real run.
    """
    if (settings := BatchSettings.current) is None:
        return ""
    user = read_values(settings)
    of_rules = {name: value for values in user.rules.values() for name, value in values.items()}
    user = replace(user, common={**of_rules, **user.common})
    return missing_values(settings, user, jobs=[("", resources)])


def has_value(name: str) -> bool:
    """Whether the user file or the site gives a value to any rule; it also works in a dry run."""
    if (settings := BatchSettings.current) is None:
        return False
    user = read_values(settings)
    return any(values.get(name) for values in (user.common, *user.rules.values()))
