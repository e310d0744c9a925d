"""Changes of a run since its newest checkpoint, and whether the run can continue with them.

`train` compares a resolved run with its checkpoint. The workflow compares the config with it before
any job runs. This module imports no torch.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState, ranges_without_effect, read_state
from tokamake.config.batching import BatchSizes
from tokamake.config.fields import dotted
from tokamake.config.resolved_run import Run, read_run
from tokamake.config.train_fields import OnChange
from tokamake.data.indexed.merge_inputs import find_manifest
from tokamake.errors import UserError
from tokamake.preflight.run_digest import effective_settings, training_index
from tokamake.runtime.console import counted
from tokamake.validation import validate

DottedSettings = dict[str, Any]
"""Settings by dotted names."""
RunRecord = dict[str, Any]
"""Data and start of a run; see `record`."""

INPUTS = "inputs"
"""Folder in the output folder of a run, with a record for each digest that the run has had."""
DECISION = "on_change"
"""File beside run.yaml with `train.on_change`: the workflow writes it, since a setting in run.yaml
would run the training again when it alone changes."""
_RECORD_KEYS = {"index", "datasets", "tokenizers", "weights"}
_LENGTH = "train.train_steps"
BATCH_SIZES = ("train.global_batch_size", "train.rampup_batch_size")
"""Settings that decide which samples a step has."""
_MAX_LINES = 6
"""Changes that a message names."""
_FIXED = {
    "step": "the run starts at another step",
    "seed": "the order of samples follows from it",
    "architecture": "the weights are those of another model",
    "train.finetune": "the run starts in another way",
    "train.load_optimizer": "the run starts in another way",
    "train.objective": "the model learns something else",
    "train.sequence_length": "the position of a run counts samples of this length",
    "train.optimizer.name": "an optimizer cannot use the states of another one",
}
"""Settings, or sections, that a run keeps to its end, each with the reason."""


class Changes(NamedTuple):
    """Changes of a run since a checkpoint."""

    lines: tuple[str, ...]
    """Changes, such as `train.optimizer.learning_rate 0.001 -> 0.0003`."""
    obstacles: tuple[str, ...]
    """Reasons why the run cannot continue with them."""
    last_step: int | None = None
    """Last step of the run with the changes, if the batch sizes have changed."""

    def __str__(self) -> str:
        hidden = len(self.lines) - _MAX_LINES
        suffix = f" and {hidden} more" if hidden > 0 else ""
        return ", ".join(self.lines[:_MAX_LINES]) + suffix


# ---- Comparison ----


def compare(
    output: Path, state: ResumeState, *, run: Run, recorded: RunRecord | None, current: RunRecord
) -> Changes:
    """Compare a run with the run of a checkpoint in its output folder.

    Args:
        output: output folder of the run.
        state: state of the checkpoint.
        run: the run.
        recorded: record of the checkpoint's run; None: it is damaged, or an earlier version wrote
            none.
        current: record of the run.
    """
    if (trained := trained_run(output, state.digest)) is None:
        return Changes(("settings (those of the checkpoint are not known)",), ("run.yaml is lost",))
    there, settings = (dotted(effective_settings(each)) for each in (trained, run))
    lines, obstacles, _ = compare_settings(there, settings, step=state.step)
    if recorded is None:
        lines = lines or ("start or data (the checkpoint has no record of them)",)
        return Changes(lines, (*obstacles, no_record(output, state.digest)))
    data = tuple(data_lines(recorded["index"], current["index"], has_settings=bool(lines)))
    obstacles += tuple(_data_obstacles(recorded, current))
    obstacles += length_obstacles(run.train.batch_sizes, run.train.num_samples, state=state)
    if recorded["weights"] != current["weights"] and not any(map(_decides_start, lines)):
        data += ("the initial checkpoint",)
        obstacles += ("the run starts from another checkpoint",)
    last_step = changed_end(
        lines, sizes=run.train.batch_sizes, num_samples=run.train.num_samples, state=state
    )
    return Changes(lines + data or ("the index has another version",), obstacles, last_step)


def trained_run(output: Path, digest: str) -> Run | None:
    """The run of the checkpoints with a digest in an output folder; None: none has a run.yaml."""
    for folder in sorted(output.glob("global_step*"), reverse=True):
        with suppress(UserError):
            state = read_state(folder, thorough=True)
            if state and state.digest == digest:
                return read_run(folder / "run.yaml")
    return None


def _decides_start(line: str) -> bool:
    """Whether a changed setting gives a run other initial weights."""
    return line.startswith(("seed ", "step ", "architecture.", "train.finetune "))


def compare_settings(earlier: DottedSettings, current: DottedSettings, *, step: int = 0) -> Changes:
    """Compare the settings that `current` has.

    Args:
        earlier: settings until now.
        current: settings from now on.
        step: finished steps.
    """
    differing = [name for name in current if earlier.get(name) != current[name]]
    lines = {name: _line(name, earlier.get(name), current[name]) for name in differing}
    name = "train.skip_data"
    if step and name in lines:
        added = [each for each in current[name] if each not in (earlier.get(name) or ())]
        if note := ranges_without_effect(added, step):
            lines[name] += f" ({note})"
    elif {*BATCH_SIZES} & lines.keys() and any(last > step for _, last in current.get(name) or ()):
        lines[name] = f"{name} {current[name]} (its steps have other samples now)"
    return Changes(
        tuple(lines.values()),
        tuple(
            f"{name}: {reason}"
            for name in differing
            if (reason := _obstacle(name, earlier.get(name), new=current[name]))
        ),
    )


def _line(name: str, old: Any, new: Any) -> str:
    old_text, new_text = ("empty" if value is None else value for value in (old, new))
    return f"{name} {old_text} -> {new_text}"


def _obstacle(name: str, old: Any, *, new: Any) -> str | None:
    for fixed, reason in _FIXED.items():
        if name == fixed or name.startswith(f"{fixed}."):
            return reason
    if name == "train.optimizer.momentum" and 0 in (old, new):
        return "with momentum 0, the optimizer has no states"
    return None


def changed_end(
    lines: Iterable[str], *, sizes: BatchSizes, num_samples: int | None, state: ResumeState
) -> int | None:
    """Last step of a run whose batch sizes have changed; None: they have not.

    Args:
        lines: changes of the settings.
        sizes: sizes of the run's batches from now on.
        num_samples: length of the run; None: not yet known.
        state: where the run stands.
    """
    if num_samples is None or not any(line.startswith(BATCH_SIZES) for line in lines):
        return None
    left = replace(sizes, first_step=state.step, first_sample=state.consumed_samples)
    return left.whole_steps(max(num_samples, state.consumed_samples))


def length_obstacles(
    sizes: BatchSizes, num_samples: int | None, *, state: ResumeState
) -> tuple[str, ...]:
    """Reason why no step is left of a run.

    Args:
        sizes: sizes of the run's batches.
        num_samples: length of the run; None: not yet known.
        state: where the run stands.
    """
    if num_samples is None:
        return ()
    left = replace(sizes, first_step=state.step, first_sample=state.consumed_samples)
    if left.whole_steps(max(num_samples, state.consumed_samples)) > state.step:
        return ()
    return (f"{_LENGTH}: no step is left after step {state.step:,}; raise it",)


# ---- Data ----


def record(run: Run, *, index: dict[str, Any], weights: str) -> RunRecord:
    """Data and start of a run: they decide its weights, besides its settings.

    Args:
        run: the resolved run.
        index: content of the index folder's index.json.
        weights: hash of the initial weights.
    """
    samples = training_index(index)
    return {
        "index": samples,
        "datasets": [*index["pairs"]],
        "tokenizers": tokenizers_of(samples["pairs"], run.data_root),
        "weights": weights,
    }


def tokenizers_of(prefixes: Iterable[str], data_root: Path) -> list[str]:
    """Fingerprints of the tokenizers of datasets, as their manifests state them.

    Args:
        prefixes: prefixes of the datasets.
        data_root: folder that they are relative to.
    """
    manifests = (find_manifest(data_root / prefix) for prefix in prefixes)
    return sorted({each["tokenizer"] for each in manifests if each and "tokenizer" in each})


def no_record(output: Path, digest: str) -> str:
    """Reason why a run without a record of its data cannot continue with a change."""
    return (
        f"{record_path(output, digest)} is lost, damaged, or an earlier version wrote none; train "
        "once with the settings before the change, which writes it"
    )


def write_record(output: Path, digest: str, *, content: RunRecord) -> None:
    """Keep the record of a run in its output folder."""
    path = record_path(output, digest)
    path.parent.mkdir(exist_ok=True)
    files.write_json(path, content)


def read_record(output: Path, digest: str) -> RunRecord | None:
    """Read the record of a run with a digest; None: there is none, or it is damaged."""
    try:
        value = files.read_json(record_path(output, digest), "")
    except UserError:
        return None
    is_whole = isinstance(value, dict) and value.keys() == _RECORD_KEYS
    return value if is_whole else None


def record_path(output: Path, digest: str) -> Path:
    """File with the record of a run with a digest."""
    return output / INPUTS / f"{digest[:16]}.json"


def data_lines(
    earlier: dict[str, Any], current: dict[str, Any], *, has_settings: bool
) -> Iterator[str]:
    """Changes of the training samples.

    Args:
        earlier: training samples of the checkpoint's run, see `training_index`.
        current: those of the run.
        has_settings: whether settings differ, which may explain another order of samples.
    """
    splits = earlier["settings"]["split"], current["settings"]["split"]
    if splits[0] != splits[1]:
        yield _line("train.split", *splits)
        has_settings = True
    old_files, new_files = (
        {file["prefix"]: file for file in samples["train"]["files"]}
        for samples in (earlier, current)
    )
    old, new = (
        {prefix: file["corpus"] for prefix, file in each.items()} for each in (old_files, new_files)
    )
    pairs = earlier["pairs"], current["pairs"]
    changed = {p: new[p] for p in new if p in old and pairs[0][p] != pairs[1][p]}
    lines = [
        *dataset_lines("added", {p: new[p] for p in new if p not in old}),
        *dataset_lines("removed", {p: old[p] for p in old if p not in new}),
        *dataset_lines("changed", changed),
    ]
    yield from lines
    if lines or earlier["train"] == current["train"]:
        return
    if any(old_files[p]["weight"] != new_files[p]["weight"] for p in new):
        yield "weights of the corpora"
    elif not has_settings:
        yield "order of the samples"


def dataset_lines(verb: str, corpus_of: Mapping[str, str]) -> Iterator[str]:
    """A line for each corpus with its first dataset.

    Args:
        verb: added, removed or changed.
        corpus_of: prefix of each dataset, and its corpus.
    """
    prefixes: dict[str, list[str]] = {}
    for prefix in sorted(corpus_of):
        prefixes.setdefault(corpus_of[prefix], []).append(prefix)
    for corpus, (first, *others) in prefixes.items():
        more = f" and {len(others)} more" if others else ""
        yield f"corpus {corpus}: {verb} {first}{more}"


def _data_obstacles(recorded: RunRecord, current: RunRecord) -> Iterator[str]:
    old, new = recorded["tokenizers"], current["tokenizers"]
    if old and not {*new} <= {*old}:
        yield "the data have another tokenizer"


# ---- Decision ----


def decision(on_change: OnChange, changes: Changes, *, state: ResumeState, output: Path) -> str:
    """Say what happens to a run that has changed.

    Args:
        on_change: `train.on_change` of the run.
        changes: changes since its newest checkpoint.
        state: state of that checkpoint.
        output: output folder of the run.

    Raises:
        UserError: the run is not to be trained, or cannot continue.
    """
    trained = f"{counted(state.step, 'step')} {'is' if state.step == 1 else 'are'} trained"
    others = "undo the change, or give the run another name"
    reasons = "; ".join(changes.obstacles)
    if changes.obstacles and all(reason.startswith(_LENGTH) for reason in changes.obstacles):
        others = f"or to 'continue' with train_steps above {state.step:,}, {others}"
    end = (
        f", and ends at step {changes.last_step:,}, with as many samples as before"
        if changes.last_step
        else ""
    )
    if on_change == "restart":
        return (
            f"{changes}; {trained}. train.on_change is restart: {output} moves aside, training "
            "starts at step 0"
        )
    if on_change == "continue" and not reasons:
        return (
            f"{changes}; {trained}. train.on_change is continue: training continues at step "
            f"{state.step:,} with the change" + end
        )
    problem = f"{changes}; {trained} in {output}. train.on_change is {on_change}"
    if reasons:
        raise UserError(
            f"{problem}, but the run cannot continue ({reasons}): set train.on_change to 'restart' "
            f"(starts at step 0), {others}"
        )
    raise UserError(
        f"{problem}: set it to 'continue' (keeps them) or to 'restart' (starts at step 0), {others}"
    )


def read_decision(config: Path, run: Run) -> Run:
    """The run with the `train.on_change` that the workflow has noted beside its run.yaml.

    Raises:
        UserError: the note is damaged.
    """
    path = config.with_name(DECISION)
    if not path.is_file():
        return run
    train = {**run.train.model_dump(), "on_change": path.read_text().strip()}
    return run.model_copy(update={"train": validate(type(run.train), train, str(path))})
