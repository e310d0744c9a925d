"""Values that differ from person to person: all that are missing, in one message."""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .request import UserFile, personal_value, read_user_file, required_names
from .settings import ExecutorSettings


def read_values(settings: ExecutorSettings) -> UserFile:
    """The user's file, over the site's own values.

    Raises:
        UserError: the file or a setting is wrong.
    """
    path = Path(os.path.expandvars(settings.user_file)).expanduser()
    user = read_user_file(path, settings.personal)
    return replace(user, common={**settings.site_values(), **user.common})


def missing_values(
    settings: ExecutorSettings, user: UserFile, jobs: Iterable[tuple[str, Mapping[str, Any]]]
) -> str:
    """What the site asks for and nobody has given, with the remedy; empty: nothing is missing.

    Args:
        settings: of the executor; `required` names what the site asks for.
        user: what the person has written down.
        jobs: name (of the rule or group) and resources of each.

    Raises:
        UserError: `required` has an unknown name.
    """
    required = required_names(settings.required, settings.personal)
    missing: dict[str, list[str]] = {}
    names = set()
    for job, resources in jobs:
        names.add(job)
        for name in required:
            resource = settings.resource_names.get(name, name)
            if not personal_value(name, resource, job, resources, user):
                missing.setdefault(name, []).append(job)
    if not missing:
        return ""
    wanting = sorted(set().union(*missing.values()))
    whom = f" for {', '.join(wanting)}" if len(wanting) < len(names) else ""
    lines = " and ".join(f"`{name}: ...`" for name in missing)
    return (
        f"{user.path}: no {', '.join(missing)}{whom}, which this site requires; write {lines} into "
        "that file, at the top for all jobs or below `rules:` and the name of a rule or group"
    )


def missing_in_workflow(workflow: Any, local_rules: Collection[str] = ()) -> str:
    """The same for the rules of a workflow that is being read, in a dry run as well.

    Groups are not known yet, so names under `rules:` that are no rules count for any rule.

    Args:
        workflow: Snakemake's, at the end of its Snakefile.
        local_rules: rules that are never submitted.

    Raises:
        UserError: the user's file or a setting is wrong.
    """
    if (settings := ExecutorSettings.given) is None:
        return ""
    user = read_values(settings)
    groups = user.rules.keys() - {rule.name for rule in workflow.rules}
    of_groups = {key: value for name in groups for key, value in user.rules[name].items()}
    user = replace(user, common={**of_groups, **user.common})
    rules = [rule for rule in workflow.rules if not rule.norun and rule.name not in local_rules]
    return missing_values(settings, user, [(rule.name, dict(rule.resources)) for rule in rules])
