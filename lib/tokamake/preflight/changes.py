"""Changes of a run since its newest checkpoint, and whether the run can continue with them.

`compare` takes the facts that are `Known`: of a resolved run (`compare_resolved`), or of a config
before any job runs (`planned_changes`). This module imports no torch.
"""

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.native.resume_state import ResumeState, ranges_without_effect
from tokamake.config.fields import dotted
from tokamake.config.resolved_run import Run
from tokamake.config.train_fields import OnChange
from tokamake.config.training import TrainSettings
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.preflight.run_record import (
    RunRecord,
    effective_settings,
    read_record,
    record_path,
    trained_run,
)
from tokamake.runtime.console import counted

DottedSettings = dict[str, Any]
"""Settings by dotted names."""
DECISION = "on_change"
"""File beside run.yaml with `train.on_change`: the workflow writes it, since a setting in run.yaml
would run the training again when it alone changes."""
_LENGTH = "train.train_steps"
_BATCH_SIZES = ("train.global_batch_size", "train.rampup_batch_size")
"""Settings that decide which samples a step has."""
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_LINES = 6
"""Changes that a message names."""
_OF_START = ("seed ", "step ", "architecture.", "train.finetune ")
"""Beginnings of lines about settings that give a run other initial weights."""
_FIXED = {
    "step": "the run starts at another step",
    "seed": "the order of samples follows from it",
    "architecture": "the weights belong to another model",
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
        return shortened(self.lines)


def shortened(lines: tuple[str, ...]) -> str:
    """The first lines, and how many more there are."""
    hidden = len(lines) - _MAX_LINES
    return ", ".join(lines[:_MAX_LINES]) + (f" and {hidden} more" if hidden > 0 else "")


# ---- Comparison ----


class Known(NamedTuple):
    """A run as far as it is known: a job knows all of it, a dry run its config and raw files."""

    train: TrainSettings
    settings: DottedSettings
    tokenizers: Collection[str]
    """Fingerprints of the tokenizers of its data; empty: not known yet."""
    start: Callable[[Run, RunRecord | None, tuple[str, ...]], Iterable[str]]
    """Changes of the start, from the checkpoint's run, its record and the changed settings."""
    data: Callable[[RunRecord, bool], Iterable[str]]
    """Changes of the data since a record. True: settings differ, which may explain the order."""
    unknown: Collection[str] = ()
    """Settings and sections that are not known yet."""
    data_set: str | None = None
    """`data_set` of the config; None: it does not matter."""


def compare(output: Path, state: ResumeState, *, known: Known) -> Changes | None:
    """Compare a run with the run of a checkpoint in its output folder.

    None: the settings of the checkpoint's run are not known.
    """
    if (trained := trained_run(output, state.digest)) is None:
        return None
    settings = {
        name: value
        for name, value in dotted(effective_settings(trained)).items()
        if not _is_one_of(name, known.unknown)
    }
    lines, obstacles, _ = compare_settings(settings, known.settings, step=state.step)
    last_step = left_until(known.train, state)
    if last_step is not None and last_step <= state.step:
        obstacles += (f"{_LENGTH}: no step is left after step {state.step:,}; raise it",)
    if not changes_batches(lines):
        last_step = None
    if known.data_set not in (None, trained.data_set):
        lines += (_line("data_set", trained.data_set, known.data_set),)
    record = read_record(output, state.digest)
    if started := tuple(known.start(trained, record, lines)):
        obstacles += ("the run starts from another checkpoint",)
    if record is None:
        path = record_path(output, state.digest)
        lost = (
            f"{path} is lost, damaged, or an earlier version wrote none; train once with the "
            "settings before the change, which writes it"
        )
        return Changes(lines + started, (*obstacles, lost), last_step)
    if record["tokenizers"] and not {*known.tokenizers} <= {*record["tokenizers"]}:
        obstacles += ("the data have another tokenizer",)
    data = tuple(known.data(record, bool(lines)))
    return Changes(lines + data + started, obstacles, last_step)


def compare_resolved(run: Run, state: ResumeState, *, current: RunRecord) -> Changes:
    """Compare a resolved run, whose digest has changed, with the run of its newest checkpoint."""

    def start(_: Run, recorded: RunRecord | None, lines: tuple[str, ...]) -> Iterator[str]:
        is_same = recorded is None or recorded["weights"] == current["weights"]
        if not is_same and not any(line.startswith(_OF_START) for line in lines):
            yield "the initial checkpoint"

    def data(recorded: RunRecord, has_settings: bool) -> Iterator[str]:
        return data_lines(recorded["index"], current["index"], has_settings=has_settings)

    settings = dotted(effective_settings(run))
    known = Known(run.train, settings, current["tokenizers"], start, data)
    changed = compare(run.output, state, known=known)
    if changed is None:
        return Changes(("settings (the checkpoint states none)",), ("run.yaml is lost",))
    if changed.lines:
        return changed
    if read_record(run.output, state.digest) is None:
        return changed._replace(lines=("start or data (the checkpoint has no record of them)",))
    return changed._replace(lines=("the index has another version",))


def compare_settings(earlier: DottedSettings, current: DottedSettings, *, step: int = 0) -> Changes:
    """Compare settings. A line for each one that was added, removed or changed."""
    pairs = {name: (earlier.get(name), current.get(name)) for name in {**current, **earlier}}
    differing = {name: (old, new) for name, (old, new) in pairs.items() if old != new}
    lines = {name: _line(name, old, new) for name, (old, new) in differing.items()}
    name = "train.skip_data"
    if step and name in lines:
        added = [each for each in current.get(name) or () if each not in (earlier.get(name) or ())]
        if note := ranges_without_effect(added, step):
            lines[name] += f" ({note})"
    elif {*_BATCH_SIZES} & lines.keys() and any(last > step for _, last in current.get(name) or ()):
        lines[name] = f"{name} {current[name]} (its steps have other samples now)"
    return Changes(
        tuple(lines.values()),
        tuple(
            f"{name}: {reason}"
            for name, (old, new) in differing.items()
            if (reason := _obstacle(name, old, new=new))
        ),
    )


def _is_one_of(name: str, settings: Iterable[str]) -> bool:
    """Whether a setting is one of some settings and sections."""
    return any(name == each or name.startswith(f"{each}.") for each in settings)


def _line(name: str, old: Any, new: Any) -> str:
    if any(isinstance(value, str) and _HASH.fullmatch(value) for value in (old, new)):
        return f"{name} differs"
    old_text, new_text = ("empty" if value is None else value for value in (old, new))
    return f"{name} {old_text} -> {new_text}"


def _obstacle(name: str, old: Any, *, new: Any) -> str | None:
    for fixed, reason in _FIXED.items():
        if _is_one_of(name, [fixed]):
            return reason
    if name == "train.optimizer.momentum" and 0 in (old, new):
        return "with momentum 0, the optimizer has no states"
    return None


def changes_batches(lines: Iterable[str]) -> bool:
    """Whether changes of settings give steps other samples."""
    return any(line.startswith(_BATCH_SIZES) for line in lines)


def left_until(train: TrainSettings, state: ResumeState) -> int | None:
    """Last step of a run that continues at a state; None: data decide the length of the run."""
    if train.num_samples is None:
        return None
    sizes, consumed = train.batch_sizes, state.consumed_samples
    left = replace(sizes, first_step=state.step, first_sample=consumed)
    return left.whole_steps(max(train.num_samples, consumed))


# ---- Data ----


def data_lines(
    earlier: dict[str, Any], current: dict[str, Any], *, has_settings: bool
) -> Iterator[str]:
    """Changes of the training samples, see `training_index`.

    `has_settings`: settings differ, which may explain another order of samples.
    """
    old, new = (
        {file["prefix"]: file for file in samples["train"]["files"]}
        for samples in (earlier, current)
    )
    lines = [
        *split_lines(earlier, current["settings"]["split"]),
        *dataset_lines(
            _corpora(earlier),
            _corpora(current),
            known=old,
            is_changed=lambda prefix: earlier["pairs"][prefix] != current["pairs"][prefix],
        ),
    ]
    yield from lines or _further_lines(earlier, current)
    has_split = earlier["settings"]["split"] != current["settings"]["split"]
    if len(lines) > has_split or earlier["train"] == current["train"]:
        return
    if any(old[p]["weight"] != new[p]["weight"] for p in new):
        yield "weights of the corpora"
    elif not has_settings and not has_split:
        yield "order of the samples"


def _further_lines(earlier: dict[str, Any], current: dict[str, Any]) -> Iterator[str]:
    """Changes of `ObjectiveData.further_data`, such as neighbors."""
    names = (name for name, value in current.items() if name not in ("settings", "pairs", "train"))
    yield from (f"{name} of the samples" for name in names if earlier.get(name) != current[name])


def split_lines(earlier: dict[str, Any], split: str) -> Iterator[str]:
    """The change of `train.split` since training samples were made, if there is one."""
    if (before := earlier["settings"]["split"]) != split:
        yield _line("train.split", before, split)


def _corpora(samples: dict[str, Any]) -> dict[str, str]:
    return {file["prefix"]: file["corpus"] for file in samples["train"]["files"]}


def dataset_lines(
    earlier: Mapping[str, str],
    current: Mapping[str, str],
    *,
    known: Container[str],
    is_changed: Callable[[str], bool],
) -> Iterator[str]:
    """A line for each corpus whose datasets (prefix → corpus) were added, removed or changed.

    Args:
        is_changed: whether the content of a dataset has changed.
    """
    added = {p: corpus for p, corpus in current.items() if p not in known}
    removed = {p: corpus for p, corpus in earlier.items() if p not in current}
    changed = {p: corpus for p, corpus in current.items() if p in earlier and is_changed(p)}
    for verb, corpus_of in (("added", added), ("removed", removed), ("changed", changed)):
        prefixes: dict[str, list[str]] = {}
        for prefix in sorted(corpus_of):
            prefixes.setdefault(corpus_of[prefix], []).append(prefix)
        for corpus, (first, *rest) in prefixes.items():
            more = f" and {len(rest)} more" if rest else ""
            yield f"corpus {corpus}: {verb} {first}{more}"


# ---- Decision ----


def decision(on_change: OnChange, changes: Changes, *, state: ResumeState, output: Path) -> str:
    """Say what happens to a run that has changed.

    Args:
        on_change: `train.on_change` of the run.
    """
    trained = f"{counted(state.step, 'step')} {'is' if state.step == 1 else 'are'} trained"
    remedy = "undo the change, or give the run another name"
    reasons = "; ".join(changes.obstacles)
    if changes.obstacles and all(reason.startswith(_LENGTH) for reason in changes.obstacles):
        remedy = f"or to 'continue' with train_steps above {state.step:,}, {remedy}"
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
            f"(starts at step 0), {remedy}"
        )
    raise UserError(
        f"{problem}: set it to 'continue' (keeps them) or to 'restart' (starts at step 0), {remedy}"
    )


def read_decision(config: Path, run: Run) -> Run:
    """The run with the `train.on_change` that the workflow has noted beside its run.yaml."""
    path = config.with_name(DECISION)
    if not path.is_file():
        return run
    train = {**run.train.model_dump(), "on_change": path.read_text().strip()}
    return run.model_copy(update={"train": validate(type(run.train), train, str(path))})
