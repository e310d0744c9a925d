"""Data of other configs' runs that this config would write again.

Data sets have names, but nothing forces a second config to use another one. Before any job runs,
the settings and raw files of the config are compared with those that the data on disk were made
with: the record data_set.json, the plan, and the manifests of the datasets.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import files
from tokamake.config.fields import dotted
from tokamake.data.corpus.plan_file import PlannedMerge
from tokamake.data.indexed.manifest import raw_inputs, read_manifest
from tokamake.data.indexed.paths import corpus_of, manifest_path
from tokamake.data.tokenizers import fingerprint
from tokamake.errors import UserError
from tokamake.preflight.changes import compare_settings, dataset_lines, shortened
from tokamake.preflight.planned import WorkflowConfig
from tokamake.preflight.planned_changes import OF_MANIFEST
from tokamake.validation import read_yaml

_OF_CORPUS = ("format", "text_key", "template", "filters")
"""Columns of the table of corpora that decide the tokens."""
_OF_TOKENIZER = ("kind", "vocab_size", "eod", "special_tokens", "train_bytes")


class Replaced(NamedTuple):
    """Data that a config writes again."""

    lines: tuple[str, ...]
    """Changes, such as `tokenizer.vocab_size 500 -> 600`."""
    corpora: frozenset[str]
    """Corpora whose merged datasets are all written again."""
    datasets: frozenset[str]
    """Other merged datasets that are written again, by prefix."""
    has_tokenizer: bool
    """Whether the tokenizer is trained again, which all runs of the data set use."""

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
            f"tokamake: data set {data_set.name}: {replaced}. replace_data is true: "
            f"{data_set.folder} is written again, and the data of {noun} {named} are lost",
            file=sys.stderr,
        )
        return
    raise UserError(
        f"data set {data_set.name}: {replaced}. The data of {noun} {named} in {data_set.folder} "
        "would be written again: give this config a data set of its own (data_set: NAME), undo "
        "the change, or replace them (--config replace_data=true)"
    )


def write_settings(config: WorkflowConfig) -> None:
    """Record the settings of the data set, at the start of the workflow."""
    earlier, current = _read_record(config), _settings(config)
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
    common = {name: value for name, value in current.items() if name in recorded}
    lines = compare_settings(recorded, common).lines
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


def _settings(config: WorkflowConfig) -> dict[str, Any]:
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
    return {**dotted(_settings(config)), "tokenizer": tokenizer}


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
