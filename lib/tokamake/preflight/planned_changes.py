"""Changes that the config and raw files show before any job: in runs, and in data on disk.

`train` compares runs again once their data exist: it also sees other initial weights and other
shares of the corpora. Nothing forces a second config to use another data folder, so
the config is compared with the data on disk (data_set.json, plan, manifests), too.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState, newest_state
from tokamake.config.architecture_files import read_architecture
from tokamake.config.data_set import RUN
from tokamake.config.fields import dotted
from tokamake.config.resolved_run import Run
from tokamake.config.root import Config
from tokamake.config_files import read_yaml
from tokamake.data.corpus.plan_file import PlannedMerge
from tokamake.data.indexed.manifest import raw_inputs, read_manifest
from tokamake.data.indexed.paths import corpus_of, manifest_path
from tokamake.data.tokenizers import fingerprint
from tokamake.errors import UserError
from tokamake.preflight import changes
from tokamake.preflight.changes import (
    Changes,
    DottedSettings,
    Known,
    compare_settings,
    dataset_lines,
    shortened,
)
from tokamake.preflight.planned import WorkflowConfig
from tokamake.preflight.run_record import RunRecord, record_path, weight_settings

OF_MANIFEST = ("append_eod", "prepend_bos", "split_sentences", "special_tokens_in_text")
"""Settings of `tokenize` that the manifest of a dataset states."""
_OF_CORPUS = ("format", "text_key", "template", "filters", "keep_copies")
"""Columns of the table of corpora that decide the tokens."""
_OF_TOKENIZER = ("kind", "vocab_size", "eod", "special_tokens", "train_bytes")


# ---- Runs of this config ----


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
    written = record_path(output, state.digest)
    settings, unknown = _known_settings(run)
    known = Known(
        train=run.train,
        settings=settings,
        tokenizers=[fingerprint(paths)] if all(path.is_file() for path in paths) else [],
        start=lambda trained, *_: _start_lines(config, name, trained=trained),
        data=lambda record, _: _data_lines(config, name, record=record, written=written),
        unknown=unknown,
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


def _known_settings(config: Config) -> tuple[DottedSettings, set[str]]:
    """Settings of a run that are known before jobs have run, and names of the unknown ones."""
    train = weight_settings(config.train)
    train |= {"train_steps": config.train.num_steps, "train_samples": None, "train_tokens": None}
    settings: dict[str, Any] = {"seed": config.seed, "train": train}
    unknown = {"step"}
    if config.model.checkpoint:
        unknown.add("architecture")
    else:
        architecture = read_architecture(Path(config.model.architecture or ""))
        settings["architecture"] = architecture.model_dump(mode="json")
    named = dotted(settings)
    # The data, the tokenizer and the device decide these.
    decided_later = ("train.train_steps", "train.precision", "architecture.vocab_size")
    unknown |= {name for name in decided_later if name in named and named[name] is None}
    return {name: value for name, value in named.items() if name not in unknown}, unknown


# ---- Data of other runs ----


class Replaced(NamedTuple):
    """Data that a config writes again."""

    lines: tuple[str, ...]
    """Changes, such as `tokenizer.vocab_size 500 -> 600`."""
    corpora: frozenset[str]
    """Corpora whose merged datasets are all written again."""
    datasets: frozenset[str]
    """Other merged datasets that are written again, by prefix."""
    has_tokenizer: bool
    """Whether the tokenizer, which all runs share, is trained again."""

    def __str__(self) -> str:
        return shortened(self.lines)

    def concerns(self, prefix: str) -> bool:
        """Whether a merged dataset of a run is written again, or its tokenizer trained again."""
        return self.has_tokenizer or corpus_of(prefix) in self.corpora or prefix in self.datasets


def check_replaced(config: WorkflowConfig) -> None:
    """Refuse to replace data that runs of other configs were trained on, unless the user asked.

    Runs of this config are left to `train.on_change`.
    """
    replaced = find_replaced(config)
    if not replaced.lines or not (runs := _dependents(config, replaced)):
        return
    data_set, named = config.data_set, ", ".join(runs)
    noun = "runs" if len(runs) > 1 else "run"
    if config.shared.replace_data:
        print(
            f"tokamake: data_set {data_set.name}: {replaced}. replace_data is true: "
            f"{data_set.folder} is written again, and the data of {noun} {named} are lost",
            file=sys.stderr,
        )
        return
    raise UserError(
        f"data_set {data_set.name}: {replaced}. The data of {noun} {named} in {data_set.folder} "
        "would be written again: give this config its own data folder (data_set: NAME), undo "
        "the change, or replace them (--config replace_data=true)"
    )


def write_settings(config: WorkflowConfig) -> None:
    """Record the settings of the data, at the start of the workflow."""
    earlier, current = _read_record(config), _data_settings(config)
    # Corpora that this config does not name stay on disk.
    corpora = {**earlier.get("corpora", {}), **current["corpora"]}
    record = {**earlier, **current, "corpora": corpora}
    if record != earlier:
        path = Path(config.data_set.settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, record)


def find_replaced(config: WorkflowConfig) -> Replaced:
    """Compare the config with the data on disk."""
    recorded, current = _on_disk(config), _current(config)
    common = current.keys() & recorded
    lines = compare_settings(
        {name: value for name, value in recorded.items() if name in common},
        {name: value for name, value in current.items() if name in common},
    ).lines
    names = [line.partition(" ")[0] for line in lines]
    columns = [name.removeprefix("corpora.") for name in names if name.startswith("corpora.")]
    corpora = {column.rpartition(".")[0] for column in columns}
    if len(columns) < len(names):
        corpora |= config.corpora.keys()
    has_tokenizer = any(name.startswith("tokenizer.") for name in names)
    if _trains_on_other_corpora(config):
        lines, has_tokenizer = lines or ("the tokenizer is trained on other corpora",), True
    changed = {
        f"merged/{merge.name}": merge.corpus
        for merge in _changed_merges(config)
        if merge.corpus not in corpora
    }
    shown = dataset_lines(changed, changed, known=changed, is_changed=lambda _: True)
    lines = (*lines, *shown)
    return Replaced(lines, frozenset(corpora), frozenset(changed), has_tokenizer)


def _data_settings(config: WorkflowConfig) -> dict[str, Any]:
    """Settings of the config that decide the tokens."""
    shared = config.shared
    settings = {
        "tokenize": shared.tokenize.model_dump(mode="json"),
        "corpora": {
            name: {column: getattr(corpus, column) or None for column in _OF_CORPUS}
            for name, corpus in config.corpora.items()
        },
    }
    if config.given_tokenizer is None:
        settings["tokenizer"] = shared.tokenizer.model_dump(mode="json", include={*_OF_TOKENIZER})
    return settings


def _current(config: WorkflowConfig) -> dict[str, Any]:
    """Settings of the config's data by dotted names, and the beginning of the tokenizer's hash.

    `describe` shows the same hash.
    """
    paths = [Path(path) for path in config.tokenizer_files]
    is_there = all(path.is_file() for path in paths)
    tokenizer = fingerprint(paths)[:12] if is_there else "one to be trained"
    return {**dotted(_data_settings(config)), "tokenizer": tokenizer}


def _on_disk(config: WorkflowConfig) -> dict[str, Any]:
    """Settings that the data on disk were made with, as far as they are known, by dotted names.

    Earlier versions wrote no record. The manifest of a merged dataset knows more than a record that
    was written before a job failed.
    """
    settings = dotted(_read_record(config))
    manifest = _any_manifest(config)
    settings |= {f"tokenize.{name}": manifest[name] for name in OF_MANIFEST if name in manifest}
    if "tokenizer" in manifest:
        settings["tokenizer"] = manifest["tokenizer"][:12]
        settings.setdefault("tokenizer.vocab_size", manifest["vocab_size"])
    return settings


def _read_record(config: WorkflowConfig) -> dict[str, Any]:
    path = Path(config.data_set.settings)
    record: dict[str, Any] = files.read_json(path, remedy := "remove it") if path.is_file() else {}
    if not isinstance(record, dict):
        raise UserError(f"{path}: damaged: not a JSON object; {remedy}")
    return record


def _any_manifest(config: WorkflowConfig) -> dict[str, Any]:
    """Manifest of the first merged dataset that is on disk; empty if there is none."""
    for merge in config.plan.merged if _has_merged(config) else ():
        prefix = Path(config.data_set.folder, "merged", merge.name)
        if manifest_path(prefix).is_file():
            with suppress(UserError):  # damaged: the workflow writes it again
                return read_manifest(prefix)
    return {}


def _has_merged(config: WorkflowConfig) -> bool:
    return Path(config.data_set.folder, "merged").is_dir()


def _trains_on_other_corpora(config: WorkflowConfig) -> bool:
    """Whether a tokenizer that is trained already would be trained on other corpora."""
    previous = config.previous_plan
    if config.given_tokenizer or config.shared.tokenizer.has_ids:
        return False
    if previous is None or not Path(config.tokenizer_files[0]).exists():
        return False
    return config.plan.tokenizer_stamp != previous.tokenizer_stamp


def _changed_merges(config: WorkflowConfig) -> Iterator[PlannedMerge]:
    """Merged datasets on disk that the plan makes from other raw files."""
    plan, previous = config.plan, config.previous_plan
    is_same = previous and previous.merged == plan.merged and not config.changed_shards
    if is_same or not _has_merged(config):
        return
    earlier = {merge.name: merge for merge in previous.merged} if previous else {}
    for merge in plan.merged:
        if old := earlier.get(merge.name):
            if old != merge or not config.changed_shards.isdisjoint(merge.shards):
                yield merge
        elif _has_other_files(config, merge):
            yield merge


def _has_other_files(config: WorkflowConfig, merge: PlannedMerge) -> bool:
    """Whether a dataset that the previous plan does not list was made from other raw files."""
    prefix = Path(config.data_set.folder, "merged", merge.name)
    if not manifest_path(prefix).is_file():
        return False
    written = manifest_path(prefix).stat().st_mtime
    planned = [Path(path) for name in merge.shards for path in config.shards[name].files]
    with suppress(UserError):
        recorded = [Path(raw["path"]) for raw in raw_inputs(read_manifest(prefix))]
        return recorded != planned or any(path.stat().st_mtime > written for path in planned)
    return False


def _dependents(config: WorkflowConfig, replaced: Replaced) -> list[str]:
    """Runs of other configs that were resolved with data that are replaced."""
    names = []
    for path in sorted(Path("results").glob("*/run.yaml")):
        if path.parent.name in config.runs:
            continue
        with suppress(UserError):
            run = read_yaml(path, "remove it")
            index = files.read_json(Path(run["index"], "index.json"), "remove it")
            if run["data_root"] == config.data_set.folder and any(
                map(replaced.concerns, index["pairs"])
            ):
                names.append(path.parent.name)
    return names
