"""Changes of runs since their newest checkpoints: what the config and raw files say before any job.

`train` compares runs again once their data exist: it also sees other initial weights and other
shares of the corpora.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState, newest_state
from tokamake.config.architecture import read_architecture
from tokamake.config.fields import dotted
from tokamake.config.resolved_run import Run
from tokamake.config.root import Config
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.paths import manifest_path
from tokamake.data.tokenizers import fingerprint
from tokamake.errors import UserError
from tokamake.preflight import changes
from tokamake.preflight.changes import Changes, DottedSettings, RunRecord
from tokamake.preflight.run_digest import WITHOUT_EFFECT, effective_settings
from tokamake.workflow.config import WorkflowConfig
from tokamake.workflow.exit import exit_on_user_error
from tokamake.workflow.paths import RUN

_OF_TOKENS = ("append_eod", "prepend_bos", "split_sentences", "special_tokens_in_text")
"""Settings of `tokenize` that manifests state."""


class RunChanges:
    """Changes of all runs; the wildcard is `run`."""

    def __init__(self, config: WorkflowConfig, *, is_main_process: bool) -> None:
        self._config = config
        self._is_main_process = is_main_process
        self._checked: set[str] = set()

    @exit_on_user_error()
    def check(self, wildcards: Any) -> None:
        """Say what happens to a run that has a checkpoint and has changed since.

        Snakemake calls this only if the run is part of what it builds.

        Raises:
            SystemExit: the run is not to be trained, or cannot continue.
        """
        name = str(wildcards.run)
        if not self._is_main_process or name in self._checked:
            return
        self._checked.add(name)
        output = Path(RUN.format(run=name)) / "training"
        state, problem = newest_state(output)
        if problem:
            print(f"tokamake: run {name}: {problem}", file=sys.stderr)
        changed = self._changes(name, output, state=state) if state else None
        if not state or not changed or not changed.lines:
            return  # `train` decides about a checkpoint of another program
        on_change = self._config.runs[name].train.on_change
        try:
            text = changes.decision(on_change, changed, state=state, output=output)
        except UserError as error:
            raise UserError(f"run {name}: {error}") from None
        print(f"tokamake: run {name}: {text}", file=sys.stderr)

    def write_decisions(self) -> None:
        """Note `train.on_change` of each run for its jobs."""
        for name, run in self._config.runs.items():
            path = Path(RUN.format(run=name)) / changes.DECISION
            if run.train.on_change == "refuse":
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_text(path, run.train.on_change)

    def _changes(self, name: str, output: Path, *, state: ResumeState) -> Changes | None:
        """Changes of a run since its newest checkpoint; None: its settings are not known."""
        config = self._config.runs[name]
        if (trained := changes.trained_run(output, state.digest)) is None:
            return None
        there, settings = dotted(effective_settings(trained)), _settings(config, trained)
        lines, obstacles, _ = changes.compare_settings(there, settings, step=state.step)
        train = config.train
        obstacles += changes.length_obstacles(train.batch_sizes, train.num_samples, state=state)
        last_step = changes.changed_end(
            lines, sizes=train.batch_sizes, num_samples=train.num_samples, state=state
        )
        if train.segment_steps and any(line.startswith(changes.BATCH_SIZES) for line in lines):
            obstacles += (
                "with other batch sizes, segments end at other steps; remove train.segment_steps",
            )
        if trained.data_set != self._config.data_set.name:
            lines += (f"data_set {trained.data_set} -> {self._config.data_set.name}",)
        started = tuple(self._start_lines(name, trained))
        obstacles += ("the run starts from another checkpoint",) * bool(started)
        record = changes.read_record(output, state.digest)
        if record and self._has_other_tokenizer(record):
            obstacles += ("the data have another tokenizer",)
        if record is None:
            obstacles += (changes.no_record(output, state.digest),)
        data = tuple(self._data_lines(name, output, state=state, record=record)) if record else ()
        return Changes(lines + started + data, obstacles, last_step)

    def _start_lines(self, name: str, trained: Run) -> Iterator[str]:
        """Changes of the run of the table that a run started from."""
        if not (parent := self._config.runs[name].model.parent):
            return
        output = Path(RUN.format(run=parent)) / "training"
        state, _ = newest_state(output)
        changed = self._changes(parent, output, state=state) if state else None
        steps = self._config.runs[parent].train.num_steps
        if state is None or changed is None or changed.lines:
            yield f"model.checkpoint: the last checkpoint of run {parent} will be another one"
        elif (
            steps
            and not state.lineage
            and (not trained.checkpoint or trained.checkpoint.name != f"global_step{steps}")
        ):
            yield f"model.checkpoint: run {parent} ends at step {steps:,}"

    def _has_other_tokenizer(self, record: RunRecord) -> bool:
        """Whether the data of a run had another tokenizer than the config's, if that exists."""
        paths = [Path(path) for path in self._config.tokenizer_files]
        if not record["tokenizers"] or not all(path.is_file() for path in paths):
            return False
        return fingerprint(paths) not in record["tokenizers"]

    def _data_lines(
        self, name: str, output: Path, *, state: ResumeState, record: RunRecord
    ) -> Iterator[str]:
        """Changes of the data of a run, as far as they are known before jobs have run."""
        run = self._config.runs[name]
        if (split := record["index"]["settings"]["split"]) != run.train.split:
            yield f"train.split {split} -> {run.train.split}"
        trained = {file["prefix"]: file["corpus"] for file in record["index"]["train"]["files"]}
        corpora = {corpus.corpus for corpus in self._config.tables[name] if corpus.trains}
        planned = {
            f"merged/{merge.name}": merge
            for merge in self._config.plan.merged
            if merge.corpus in corpora
        }
        known = set(record["datasets"])
        folder = Path(self._config.data_set.folder)
        rebuilt = _rebuilt(
            trained, record, written=changes.record_path(output, state.digest), folder=folder
        )
        changed = self._config.changed_shards
        for verb, corpus_of in (
            ("added", {p: merge.corpus for p, merge in planned.items() if p not in known}),
            ("removed", {p: corpus for p, corpus in trained.items() if p not in planned}),
            (
                "changed",
                {
                    p: merge.corpus
                    for p, merge in planned.items()
                    if p in trained and (p in rebuilt or changed & {*merge.shards})
                },
            ),
        ):
            yield from changes.dataset_lines(verb, corpus_of)
        yield from self._token_lines(next(iter(trained)))

    def _token_lines(self, prefix: str) -> Iterator[str]:
        """Settings of `tokenize` that differ from those of a finished dataset."""
        try:
            manifest = read_manifest(Path(self._config.data_set.folder) / prefix)
        except UserError:  # damaged or deleted: it is written again
            return
        current = self._config.shared.tokenize.model_dump()
        for name in _OF_TOKENS:
            if name in manifest and manifest[name] != current[name]:
                yield f"tokenize.{name} {manifest[name]} -> {current[name]}"


def _settings(config: Config, trained: Run) -> DottedSettings:
    """Settings of a run by dotted names, as far as they are known before jobs have run."""
    train = config.train.model_dump(mode="json", exclude=WITHOUT_EFFECT)
    train |= {"train_steps": config.train.num_steps, "train_samples": None, "train_tokens": None}
    settings: dict[str, Any] = {"seed": config.seed, "train": train}
    if config.model.checkpoint is None:
        architecture = read_architecture(Path(config.model.architecture or ""))
        settings["architecture"] = architecture.model_dump(mode="json")
    named = dotted(settings)
    # The data, the tokenizer and the device decide these.
    for name in ("train.train_steps", "train.precision", "architecture.vocab_size"):
        if named.get(name, "") is None:
            del named[name]
    return named


def _rebuilt(
    trained: dict[str, str], record: RunRecord, *, written: Path, folder: Path
) -> set[str]:
    """Datasets that were written with other content after a run recorded them."""
    recorded_at = written.stat().st_mtime_ns
    rebuilt = set()
    for prefix in trained:
        path = manifest_path(folder / prefix)
        if path.is_file() and path.stat().st_mtime_ns > recorded_at:
            try:
                manifest = read_manifest(folder / prefix)
            except UserError:
                continue
            if manifest["sha256"] != record["index"]["pairs"][prefix]["sha256"]:
                rebuilt.add(prefix)
    return rebuilt
