"""Values of the user file and the site, and one message for all that are missing."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .settings import ExecutorSettings
from .user_file import UserFile, personal_value, read_user_file, required_names


def read_values(settings: ExecutorSettings) -> UserFile:
    """Values of the user file; they replace the site's values."""
    path = Path(os.path.expandvars(settings.user_file)).expanduser()
    user = read_user_file(path, settings.personal)
    return replace(user, common={**settings.site_values(), **user.common})


def missing_values(
    settings: ExecutorSettings, user: UserFile, *, jobs: Iterable[tuple[str, Mapping[str, Any]]]
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
    if (settings := ExecutorSettings.current) is None:
        return ""
    user = read_values(settings)
    of_rules = {name: value for values in user.rules.values() for name, value in values.items()}
    user = replace(user, common={**of_rules, **user.common})
    return missing_values(settings, user, jobs=[("", resources)])


def has_value(name: str) -> bool:
    """Whether the user file or the site gives a value to any rule; it also works in a dry run."""
    if (settings := ExecutorSettings.current) is None:
        return False
    user = read_values(settings)
    return any(values.get(name) for values in (user.common, *user.rules.values()))
