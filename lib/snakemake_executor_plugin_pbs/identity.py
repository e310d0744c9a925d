"""What tells Snakemake's jobs apart, and whether a running one would make the same thing again."""

import hashlib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from .records import key_of


def name(job: Any) -> str:
    """What a person calls a job: its rule's name, or that of its group."""
    return str(job.groupid if job.is_group() else job.name)


def title(job: Any) -> str:
    """The same in a sentence."""
    return f"{'group' if job.is_group() else 'rule'} {name(job)}"


def rules(job: Any) -> list[str]:
    """Names of the rules of a job, in alphabetical order."""
    return sorted({str(one.name) for one in members(job)})


def names(workflow: Any) -> set[str]:
    """All that a person may call a job of a workflow: its rules and groups."""
    rules = list(getattr(workflow, "rules", ()))
    found = {str(one) for rule in rules for one in (rule.name, rule.group) if one}
    settings = getattr(workflow, "group_settings", None)
    return found | set(map(str, getattr(settings, "overwrite_groups", {}).values()))


def outputs(job: Any) -> tuple[str, ...]:
    """Files that a job, or all jobs of a group, make."""
    return tuple(
        sorted({str(Path(str(path)).absolute()) for one in members(job) for path in one.output})
    )


def key(job: Any) -> str:
    """Name of a job that is the same in every run of the workflow in this folder."""
    names = (
        (
            one.rule.name,
            *sorted(map(str, one.wildcards_dict.items())),
            *sorted(map(str, one.output)),
        )
        for one in members(job)
    )
    return key_of(part for name in sorted(names) for part in ("job", *name))


def fingerprint(job: Any) -> str:
    """Hash of what a job makes its files from: its rule's text, parameters and input files.

    Sizes and times of input files count, resources do not: a job that was given more memory makes
    the same files. Nor do files count that a group hands on within, which come and go with it.
    """
    digest, made = hashlib.sha256(), set(outputs(job))
    for one in sorted(members(job), key=lambda one: (one.rule.name, str(one.output))):
        rule = one.rule
        texts = [rule.name, rule.shellcmd, rule.script, rule.notebook, rule.wrapper]
        texts += [sorted(one.wildcards_dict.items()), *map(str, one.output), *map(str, one.params)]
        for text in map(str, [*texts, *_states(one.input, made)]):
            digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _states(inputs: Iterable[Any], made: Container[str]) -> Iterable[str]:
    for path in inputs:
        ancient = bool(getattr(path, "flags", {}).get("ancient"))
        inside = str(Path(str(path)).absolute()) in made
        if ancient or inside or not Path(str(path)).is_file():
            yield str(path)
            continue
        found = Path(str(path)).stat()
        yield f"{path} {found.st_size} {found.st_mtime_ns}"


def members(job: Any) -> list[Any]:
    """The jobs of a group, or the job itself."""
    return list(job.jobs) if job.is_group() else [job]
