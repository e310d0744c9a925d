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
from tokamake.config.data_set import RUN
from tokamake.config.fields import dotted
from tokamake.config.resolved_run import Run
from tokamake.config.root import Config
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.paths import manifest_path
from tokamake.data.tokenizers import fingerprint
from tokamake.errors import UserError
from tokamake.preflight import changes
from tokamake.preflight.changes import Changes, DottedSettings, Known, RunRecord
from tokamake.preflight.planned import WorkflowConfig
from tokamake.preflight.run_digest import WITHOUT_EFFECT

OF_MANIFEST = ("append_eod", "prepend_bos", "split_sentences", "special_tokens_in_text")
"""Settings of `tokenize` that the manifest of a dataset states."""


def check_changes(config: WorkflowConfig, name: str) -> None:
    """Say what happens to a run that has a checkpoint and has changed since."""
    output = _output(name)
    state, problem = newest_state(output)
    if problem:
        print(f"tokamake: run {name}: {problem}", file=sys.stderr)
    changed = _changes(config, name, state=state) if state else None
    if not state or not changed or not changed.lines:
        return  # `train` decides about a checkpoint of another program
    on_change = config.runs[name].train.on_change
    text = changes.decision(on_change, changed, state=state, output=output)
    print(f"tokamake: run {name}: {text}", file=sys.stderr)


def write_decisions(config: WorkflowConfig) -> None:
    """Note `train.on_change` of each run for its jobs."""
    for name, run in config.runs.items():
        path = Path(RUN.format(run=name)) / changes.DECISION
        if run.train.on_change == "refuse":
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(path, run.train.on_change)


def _output(name: str) -> Path:
    return Path(RUN.format(run=name)) / "training"


def _changes(config: WorkflowConfig, name: str, *, state: ResumeState) -> Changes | None:
    """Changes of a run since its newest checkpoint; None: its settings are not known."""
    run, output = config.runs[name], _output(name)
    paths = [Path(path) for path in config.tokenizer_files]
    written = changes.record_path(output, state.digest)
    known = Known(
        train=run.train,
        settings=_settings(run),
        tokenizers=[fingerprint(paths)] if all(path.is_file() for path in paths) else [],
        start=lambda trained, *_: _start_lines(config, name, trained=trained),
        data=lambda record, _: _data_lines(config, name, record=record, written=written),
        data_set=config.data_set.name,
    )
    changed = changes.compare(output, state, known=known)
    if changed and run.train.segment_steps and changes.changes_batches(changed.lines):
        reason = "with other batch sizes, segments end at other steps; remove train.segment_steps"
        return changed._replace(obstacles=(*changed.obstacles, reason))
    return changed


def _start_lines(config: WorkflowConfig, name: str, *, trained: Run) -> Iterator[str]:
    """Changes of the run of the table that a run started from."""
    if not (parent := config.runs[name].model.parent):
        return
    state, _ = newest_state(_output(parent))
    changed = _changes(config, parent, state=state) if state else None
    steps = config.runs[parent].train.num_steps
    if state is None or changed is None or changed.lines:
        yield f"model.checkpoint: the last checkpoint of run {parent} will be another one"
    elif (
        steps
        and not state.lineage
        and (not trained.checkpoint or trained.checkpoint.name != f"global_step{steps}")
    ):
        yield f"model.checkpoint: run {parent} ends at step {steps:,}"


def _data_lines(
    config: WorkflowConfig, name: str, *, record: RunRecord, written: Path
) -> Iterator[str]:
    """Changes of the data of a run since a record was written, as far as raw files show them."""
    index = record["index"]
    trained = {file["prefix"]: file["corpus"] for file in index["train"]["files"]}
    corpora = {corpus.corpus for corpus in config.tables[name] if corpus.trains}
    planned = {
        f"merged/{merge.name}": merge for merge in config.plan.merged if merge.corpus in corpora
    }

    def is_changed(prefix: str) -> bool:
        shards = config.changed_shards & {*planned[prefix].shards}
        return bool(shards) or _is_rebuilt(config, prefix, record=record, written=written)

    yield from changes.split_lines(index, config.runs[name].train.split)
    yield from changes.dataset_lines(
        trained,
        {prefix: merge.corpus for prefix, merge in planned.items()},
        known={*record["datasets"]},
        is_changed=is_changed,
    )
    yield from _token_lines(config, next(iter(trained)))


def _is_rebuilt(config: WorkflowConfig, prefix: str, *, record: RunRecord, written: Path) -> bool:
    """Whether a dataset was written with other content after a run recorded it."""
    path = Path(config.data_set.folder, prefix)
    manifest = manifest_path(path)
    if not manifest.is_file() or manifest.stat().st_mtime_ns <= written.stat().st_mtime_ns:
        return False
    try:
        return bool(read_manifest(path)["sha256"] != record["index"]["pairs"][prefix]["sha256"])
    except UserError:
        return False


def _token_lines(config: WorkflowConfig, prefix: str) -> Iterator[str]:
    """Settings of `tokenize` that differ from a finished dataset."""
    try:
        manifest = read_manifest(Path(config.data_set.folder) / prefix)
    except UserError:  # damaged or deleted: it is written again
        return
    current = config.shared.tokenize.model_dump()
    for name in OF_MANIFEST:
        if name in manifest and manifest[name] != current[name]:
            yield f"tokenize.{name} {manifest[name]} -> {current[name]}"


def _settings(config: Config) -> DottedSettings:
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
