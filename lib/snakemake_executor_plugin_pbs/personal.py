"""Values that differ from person to person: all that are missing, in one message."""

import os
from collections.abc import Iterable, Mapping
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


def missing_in_workflow(workflow: Any) -> str:
    """What nobody has given for any rule of a workflow that is being read, in a dry run as well.

    Which rules will run, and in which groups, is not known yet. So a value that is given for one of
    them counts for all; the executor itself checks the jobs of a real run.

    Args:
        workflow: Snakemake's, at the end of its Snakefile.

    Raises:
        UserError: the user's file or a setting is wrong.
    """
    if (settings := ExecutorSettings.given) is None:
        return ""
    user = read_values(settings)
    given = {name: value for values in user.rules.values() for name, value in values.items()}
    user = replace(user, common={**given, **user.common})
    resources = {name: value for rule in workflow.rules for name, value in rule.resources.items()}
    return missing_values(settings, user, [("", resources)])
