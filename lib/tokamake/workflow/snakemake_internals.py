"""The only place of the workflow that touches private names of Snakemake.

docs/explanation/workflow.md lists the names, each with the reason and its test in
tests/workflow/test_snakemake_internals*.py: a version of Snakemake that breaks one fails there by
name. Written for Snakemake 9.20 to 9.27.
"""

import ast
import atexit
import json
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from snakemake import io
from snakemake.persistence import RECORD_FORMAT_VERSION, MetadataRecord, ParamsChange
from snakemake.persistence.file import FilePersistence
from snakemake.resources import Resource
from snakemake.settings.types import DeploymentMethod

from tokamake import files
from tokamake.config.fields import dotted
from tokamake.errors import UserError
from tokamake.runtime.console import counted
from tokamake.status.jobs import DagJob
from tokamake.workflow.paths import is_plan, record_path

_MAX_VALUE = 100
"""Characters of a changed param that a message shows."""
_FORMER_PARAMS: tuple[tuple[str, str, Callable[[str], bool], list[str]], ...] = (
    ("{params.plan:q}", "{input.plan:q}", lambda value: is_plan(value.strip("'")), []),
    ("run:q} {params.ranks:q}", "run:q}", lambda value: value == "[]", []),
    ("held_out:q} --seq", "held_out:q} {params.neighbors:q} --seq", lambda _: False, ["[]"]),
    ("passages:q} --ch", "passages:q} {params.byte_range:q} --ch", lambda _: False, ["[]"]),
    ("fetched:q} --tok", "fetched:q} {params.neighbors:q} --tok", lambda _: False, ["[]"]),
)
"""Params of commands of earlier versions: former text, its text now, whether a recorded value is a
param that the command has no more, and values of params that it has now."""


class Snakemake:
    """Private parts of Snakemake that the workflow uses."""

    def __init__(self, workflow: Any) -> None:
        """Remember under which names this file's rules are known.

        Args:
            workflow: Snakemake's global `workflow`, in workflow/Snakefile.
        """
        self._workflow = workflow
        self.repository = Path(workflow.current_basedir).resolve().parent
        """Parent of this file's folder."""
        # `use rule * from tokamake as tokamake_*` renames rules.
        self._renamed = workflow.modifier.modify_rulename

    @property
    def is_main_process(self) -> bool:
        """Whether jobs are planned here; False in the process of a job."""
        return bool(self._workflow.is_main_process)

    @property
    def executes_jobs(self) -> bool:
        """Whether jobs are run or touched: no dry run, and no list of files; known with the DAG."""
        return self._workflow.executor_plugin is not None and not self._workflow.dryrun

    @property
    def is_dry_run(self) -> bool:
        """Whether jobs are listed but not run; False for a list of files, or a picture."""
        return self._workflow.executor_plugin is not None and bool(self._workflow.dryrun)

    @property
    def uses_conda(self) -> bool:
        """Whether jobs run in the conda environments of their rules."""
        return DeploymentMethod.CONDA in self._workflow.deployment_settings.deployment_method

    @property
    def environment(self) -> str:
        """Conda environment of the rules, with doubled braces: Snakemake formats the path."""
        path = str(self.repository / "workflow/envs/tokamake.yaml")
        return path.replace("{", "{{").replace("}", "}}")

    @property
    def config_files(self) -> list[str]:
        """Files that `--configfile` names."""
        return [str(path) for path in self._workflow.overwrite_configfiles]

    @property
    def overrides(self) -> list[str]:
        """Dotted names of the settings that `--config` gives."""
        return [*dotted(dict(self._workflow.config_settings.config))]

    def renamed(self, rule: str) -> str:
        """The name under which Snakemake knows a rule of this workflow."""
        return str(self._renamed(rule))

    def original_name(self, target: str) -> str:
        """The name that a rule has in this workflow; empty for rules of other workflows."""
        before, after = self.renamed("\0").split("\0")
        is_own = target.startswith(before) and target.endswith(after)
        return target[len(before) : len(target) - len(after)] if is_own else ""

    def is_rule(self, name: str) -> bool:
        """Whether a rule has this name."""
        return bool(self._workflow.is_rule(name))

    def rule_names(self) -> list[str]:
        """Names of all rules."""
        return [rule.name for rule in self._workflow.rules]

    def declared_resources(self) -> dict[str, Any]:
        """Resources of all rules; for a repeated name, the last rule wins."""
        rules = self._workflow.rules
        return {name: value for rule in rules for name, value in rule.resources.items()}

    def is_produced(self, path: str) -> bool:
        """Whether some rule makes a file."""
        return any(rule.is_producer(path) for rule in self._workflow.rules)

    def outputs(self, rule: str) -> tuple[set[str], list[str]]:
        """Names of a rule's wildcards, and its outputs as format strings."""
        declared = self._workflow.get_rule(rule)
        outputs = [str(io.strip_wildcard_constraints(output)) for output in declared.output]
        return set(declared.wildcard_names), outputs

    def rule_resources(self, rule: str) -> dict[str, Any]:
        """Resources that a profile or `--set-resources` gives a rule."""
        overwritten = self._workflow.resource_settings.overwrite_resources
        return {name: each.raw for name, each in overwritten.get(self.renamed(rule), {}).items()}

    def default_resource(self, name: str) -> Any:
        """A resource of `default-resources` as it is written there; None: not given."""
        defaults = self._workflow.resource_settings.default_resources or {}
        return defaults[name].raw if name in defaults else None

    @property
    def launch(self) -> str:
        """Launch script of the profile; empty without one."""
        return str(self.default_resource("launch") or "").strip("'\"")

    def resolve_launch(self) -> None:
        """Let a profile's launch script be found from any working directory.

        Profiles name their scripts relative to the repository. If the working directory has no such
        file, the repository's file counts.
        """
        if (path := self._resolve(self.launch)) != self.launch:
            settings = self._workflow.resource_settings
            resource = Resource("launch", path, raw=repr(path))
            settings.default_resources["launch"] = resource
            settings._parsed_default_resources["launch"] = resource

    def resolve_precommand(self) -> None:
        """Let scripts in `precommand` be found; it runs in each remote job, and is known then."""
        settings = self._workflow.remote_execution_settings  # None: all jobs run here
        if settings and settings.precommand:
            words = settings.precommand.split(" ")
            resolved = (self._resolve(word) if "/" in word else word for word in words)
            settings.precommand = " ".join(resolved)

    def _resolve(self, path: str) -> str:
        is_here = Path(path).is_absolute() or Path(path).exists()
        in_repository = self.repository / path
        return path if is_here or not in_repository.exists() else str(in_repository)

    def force_job(self, path: str) -> None:
        """Run the job that writes a file, as `--forcerun` does, in a dry run too."""
        self._workflow.dag.forcefiles.add(path)

    def planned_rules(self) -> set[str]:
        """Names of the rules that have jobs to run, as this workflow names them.

        A dry run has marked them as finished at its end. Without a DAG, there are none.
        """
        if (dag := self._workflow.dag) is None:
            return set()
        rules = {job.rule for job in dag.jobs if dag.needrun(job)}
        return {self.original_name(rule.name) for rule in rules}

    def jobs(self) -> list[DagJob]:
        """Jobs of the DAG that have a log, finished ones too, in the order of the data flow."""
        dag = self._workflow.dag
        rules = [rule.name for rule in self._workflow.rules]
        return [
            DagJob(
                rule=self.original_name(job.rule.name),
                run=job.wildcards_dict.get("run", ""),
                outputs=[*map(str, job.output)],
                inputs=sorted({str(path) for p in dag.dependencies[job].values() for path in p}),
                log=str(job.log[0]),
                is_local=job.is_local,
            )
            for level in dag.toposorted()
            for job in sorted(level, key=lambda job: (rules.index(job.rule.name), *job.output))
            if job.log and self.original_name(job.rule.name)
        ]

    def recorded_inputs(self, path: str) -> list[str]:
        """Inputs that a file was made from, as Snakemake recorded them; none without a record."""
        return list(self._workflow.persistence.input(io.IOFile(path)) or [])

    def keep_records_beside_outputs(self) -> None:
        """Let Snakemake keep its records of finished jobs in `results/`; it opens them later."""
        from snakemake import workflow  # at the top, it fails unless Snakemake runs

        workflow.FilePersistence = _Records
        if self.is_main_process:
            atexit.register(_report_unrecorded)

    def expand_targets(self, expand: Callable[[Iterable[str]], set[str]]) -> None:
        """Replace the targets that a user asks for, before Snakemake looks for them."""
        prepare = self._workflow._prepare_dag

        def call(*args: Any, **options: Any) -> None:
            settings = self._workflow.dag_settings
            settings.targets = expand(settings.targets)
            prepare(*args, **options)

        self._workflow._prepare_dag = call

    def on_start(self, function: Callable[[], None]) -> None:
        """Call a function before the first job, but not in a dry run.

        The directive `onstart` is ignored in modules.
        """
        self._chain("_onstart", function)

    def on_new_jobs(self, function: Callable[[], None]) -> None:
        """Call a function once a checkpoint has added jobs to the DAG, before they start."""
        _Records.on_new_jobs.append(function)

    def on_error(self, function: Callable[[], None]) -> None:
        """Call a function after a failure. The directive `onerror` is ignored in modules."""
        self._chain("_onerror", function)

    def _chain(self, hook: str, function: Callable[[], None]) -> None:
        previous = getattr(self._workflow, hook)

        def call(log: Any) -> None:
            function()
            previous(log)

        setattr(self._workflow, hook, call)


class _Records(FilePersistence):
    """Keeps the records of finished jobs beside their outputs; see `record_path`.

    Another clone that shares `results/`, or one without `.snakemake`, then compares params and
    inputs as this one does. Records of earlier versions in `.snakemake` are read.
    """

    unrecorded: ClassVar[dict[str, str]] = {}
    """Rule of each finished output without a record."""
    on_new_jobs: ClassVar[list[Callable[[], None]]] = []
    """Functions to call when the DAG has other jobs than before."""
    _num_jobs: int | None = None

    def has_metadata(self, job: Any) -> bool:
        """Whether all outputs have records; note outputs without one."""
        for output in map(self._get_key, job.output):
            if record_path(output) and Path(output).exists() and not self._read_record(output):
                self.unrecorded[output] = job.rule.name
        return bool(super().has_metadata(job))

    def started(self, job: Any, external_jobid: str | None = None) -> None:
        """Record a job's inputs and params; its old outputs count as incomplete from now on."""
        super().started(job, external_jobid)
        if self.dag.workflow.is_main_process:
            record = MetadataRecord(
                record_format_version=RECORD_FORMAT_VERSION,
                rule=job.rule.name,
                code=self._code(job.rule),
                input=self._input(job),
                params=self._params(job),
                incomplete=True,
            )
            for output in job.output:
                self._write_record(self._get_key(output), record)
            before, self._num_jobs = self._num_jobs, len(self.dag.jobs)
            for function in self.on_new_jobs if before not in (None, self._num_jobs) else ():
                function()

    async def finished(self, job: Any) -> None:
        """Complete the records; the process of a job does, too, if the main process was killed."""
        await super().finished(job)
        for key in map(self._get_key, job.output):
            if (record := self._read_record(key)) and record.incomplete:
                record.incomplete = False
                self._write_record(key, record)

    def params_changed(self, job: Any, file: Any = None) -> Any:
        """Changed params, with a short text."""
        change = super().params_changed(job, file)
        return _ShortChange(change.only_old, change.only_new, change.files) if change else change

    def _input(self, job: Any) -> list[str]:
        # Records of earlier versions have no plan, and a first dry run sees none.
        return [path for path in super()._input(job) if not is_plan(path)]

    def _read_record(self, key: str) -> MetadataRecord | None:
        path = record_path(key)
        record = (_read_record_file(path) if path else None) or super()._read_record(key)
        for former, now, is_former, added in _FORMER_PARAMS:
            if record and record.code and record.params and former in record.code:
                record = record.model_copy()
                record.code = record.code.replace(former, now)
                kept = [each for each in record.params if not is_former(str(each))]
                record.params = [*kept, *added]
        return record

    def _write_record(self, key: str, record: MetadataRecord) -> None:
        if path := record_path(key):
            files.write_json(path, dict(record.items()))
            super()._delete_record(key)
        else:
            super()._write_record(key, record)

    def _delete_record(self, key: str) -> bool:
        path = record_path(key)
        is_beside = path is not None and path.is_file()
        if path and is_beside:
            path.unlink()
        return bool(super()._delete_record(key)) or is_beside

    def _clear_cache(self) -> None:
        super()._clear_cache()
        _read_record_file.cache_clear()

    def _filter_incomplete_keys(self, keys: Iterable[str]) -> set[str]:
        keys = list(keys)
        recorded = {key for key in keys if (r := self._read_record(key)) and r.incomplete}
        return recorded | super()._filter_incomplete_keys(keys)


@lru_cache
def _read_record_file(path: Path) -> MetadataRecord | None:
    """Record in a file, if it exists. A damaged one differs from any job, so its job reruns."""
    if not path.is_file():
        return None
    try:
        return MetadataRecord.model_validate(files.read_json(path, ""))
    except (UserError, ValueError):
        return MetadataRecord(record_format_version=RECORD_FORMAT_VERSION, params=["damaged"])


def _report_unrecorded() -> None:
    unrecorded = _Records.unrecorded.items()
    rules = {path: rule for path, rule in unrecorded if not Path(record_path(path) or "").is_file()}
    if rules:
        print(
            f"tokamake: {counted(len(rules), 'finished file')} (first {min(rules)}): no record in "
            ".made_from, so a changed setting reruns nothing; if one has changed, give --forcerun "
            f"{' '.join(sorted({*rules.values()}))}",
            file=sys.stderr,
        )


class _ShortChange(ParamsChange):
    """Changed params; the reason of a job names the settings that differ, not all settings."""

    def __str__(self) -> str:
        before, now = self.only_old, self.only_new  # representations of Python objects
        sections = [[*filter(None, map(_section, values))] for values in (before, now)]
        if len(sections[0]) == len(sections[1]) == len(before) == len(now) == 1:
            old, new = sections[0][0], sections[1][0]
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            return ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names)
        texts = (", ".join(map(_cut, sorted(values))) or "none" for values in (before, now))
        return " -> ".join(texts)


def _section(value: str) -> dict[str, Any] | None:
    """Settings by dotted names if a value is the JSON text of a section, else None."""
    try:
        section = json.loads(ast.literal_eval(value))
    except (ValueError, SyntaxError, TypeError):
        return None
    return dotted(section) if isinstance(section, dict) else None


def _cut(value: str) -> str:
    return value if len(value) <= _MAX_VALUE else f"{value[:_MAX_VALUE]}…"


def ancient(paths: list[str]) -> list[str]:
    """Input files whose times rerun no job."""
    flagged: list[str] = io.ancient(paths)
    return flagged


def check_braces(paths: Iterable[Path], setting: str) -> None:
    """Refuse input files whose names have braces: Snakemake knows no escape for them."""
    for path in paths:
        if io.contains_wildcard(str(path)):
            raise UserError(
                f"{setting}: {path}: braces in a path are wildcards of Snakemake; rename the file "
                "or folder, or give a link to it"
            )
