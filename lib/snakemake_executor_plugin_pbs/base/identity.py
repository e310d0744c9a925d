"""Names, keys and fingerprints of Snakemake's jobs."""

import hashlib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from .records import key_of
from .snakemake_internals import code, is_ancient, members, params, wildcards


def name(job: Any) -> str:
    """Name of a job's rule, or of its group."""
    return str(job.groupid if job.is_group() else job.name)


def title(job: Any) -> str:
    """Name of a job with the word `rule` or `group`."""
    return f"{'group' if job.is_group() else 'rule'} {name(job)}"


def rules(job: Any) -> list[str]:
    return sorted({str(member.name) for member in members(job)})


def outputs(job: Any) -> tuple[str, ...]:
    """Absolute paths of the files that a job, or all jobs of a group, write."""
    paths = {str(path) for member in members(job) for path in member.output}
    return tuple(sorted({str(Path(path).absolute()) for path in paths}))


def key(job: Any) -> str:
    """Key of a job, the same in every run of the workflow in this folder."""
    identities = (
        (
            member.name,
            *sorted(map(str, wildcards(member).items())),
            *sorted(map(str, member.output)),
        )
        for member in members(job)
    )
    return key_of(part for identity in sorted(identities) for part in ("job", *identity))


def fingerprint(job: Any) -> str:
    """Hash of everything that determines a job's files: code, parameters and input files.

    Input files count with size and time. Resources do not count: a job with more memory writes the
    same files. Files between jobs of a group do not count either, since the group writes them.
    """
    digest, own_outputs = hashlib.sha256(), set(outputs(job))
    for member in sorted(members(job), key=lambda each: (each.name, str(each.output))):
        texts = [*code(member), sorted(wildcards(member).items())]
        texts += [*map(str, member.output), *map(str, params(member))]
        for text in map(str, [*texts, *_input_states(member.input, own_outputs)]):
            digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _input_states(inputs: Iterable[Any], own_outputs: Container[str]) -> Iterable[str]:
    """Path, size and time of each input file; the path alone if size and time do not count."""
    for path in inputs:
        internal = str(Path(str(path)).absolute()) in own_outputs
        if is_ancient(path) or internal or not Path(str(path)).is_file():
            yield str(path)
            continue
        status = Path(str(path)).stat()
        yield f"{path} {status.st_size} {status.st_mtime_ns}"
