"""Starts of runs: random weights, a checkpoint on disk, or another run of the table.

The dry run checks a checkpoint before it exists, from the config of the run that will write it.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from tokamake.checkpoint.detect import list_files, open_any
from tokamake.checkpoint.hf.config_json import read_config
from tokamake.checkpoint.native.resume_state import newest_state
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.config.data_set import RUN
from tokamake.config.model import check_export_format, parse_export_format
from tokamake.config.root import Config
from tokamake.config.runs import NamedRun
from tokamake.config_files import read_yaml
from tokamake.data.tokenizers import tokenizer_files
from tokamake.errors import UserError, naming
from tokamake.preflight.initial_checkpoint import (
    check_optimizer,
    check_progress,
    check_start,
    decide_schedule,
    initial_architecture,
)
from tokamake.preflight.model import check_layout_and_length, check_objective
from tokamake.preflight.other_family import check_weights_alone, start_note
from tokamake.remote.hub_models import unfetched


class InitialModel(NamedTuple):
    """The model that a run starts with."""

    architecture: Architecture
    source: str
    """Where the architecture is from, for messages."""


@contextmanager
def naming_setting(where: str, setting: str) -> Iterator[None]:
    """Put the config file and the setting before the message of an error."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {setting}: {str(error).removeprefix('tokenizer ')}") from None


def check_initial_models(
    runs: Mapping[str, NamedRun], *, is_main_process: bool
) -> dict[str, InitialModel]:
    """Check that the initial model of each run fits its config.

    Args:
        is_main_process: whether checkpoints are opened, for which torch is imported.

    Returns:
        Initial model of each run, as far as it is opened.
    """
    models: dict[str, InitialModel] = {}
    for name in parents_first(runs):
        run, where = runs[name]
        if run.model.folder and not is_main_process:
            continue
        parent = run.model.parent
        if parent and parent not in models:  # it starts from a checkpoint that is not opened
            continue
        setting = "model.checkpoint" if run.model.checkpoint else "model.architecture"
        with naming_setting(where, setting):
            if parent:
                initial = _model_of_child(run, runs[parent].config, initial=models[parent])
            else:
                initial = initial_model(run)
        _check_model(run, initial, where=where)
        models[name] = initial
    return models


def parents_first(runs: Mapping[str, NamedRun]) -> list[str]:
    """Names of the runs, each after the run that it starts from."""
    return list(dict.fromkeys(name for run in runs for name in reversed(ancestors(run, runs))))


def ancestors(name: str, runs: Mapping[str, NamedRun]) -> list[str]:
    """A run, the run that it starts from, the one before, and so on."""
    chain = [name]
    while parent := runs[chain[-1]].config.model.parent:
        where = f"{runs[chain[-1]].where}: model.checkpoint"
        if parent not in runs:
            raise UserError(f"{where}: {_unknown(parent, runs)}")
        if parent in chain:
            circle = " -> ".join([*chain[chain.index(parent) :], parent])
            raise UserError(
                f"{where}: runs start from each other in a circle ({circle}); let one start "
                "from random weights or from a folder"
            )
        chain.append(parent)
    return chain


def _unknown(parent: str, runs: Mapping[str, NamedRun]) -> str:
    close = get_close_matches(parent, runs, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(runs)}."
    return (
        f"no run of this config is called {parent}; {hint} If it is a run of another config, give "
        f"its folder, results/{parent}/training"
    )


def initial_model(run: Config) -> InitialModel:
    """The model of a run that starts from random weights or a folder."""
    model = run.model
    if not model.folder:
        assert model.stated, "checked by ModelSettings"
        return InitialModel(read_architecture(model.stated), str(model.stated))
    if unfetched(model.folder):
        # Its weights are not downloaded yet. config.json is enough: hf has no optimizer states.
        start = Checkpoint("hf", model.folder, read_config(model.folder)[0], TensorSource([], {}))
    else:
        start = open_any(model.folder)
    architecture = initial_architecture(start.architecture, model.stated, source=start.path)
    check_start(start, run.train, architecture=architecture)
    if note := start_note(start.architecture, architecture, source=start.path):
        print(f"tokamake: run {run.run}: {note}", file=sys.stderr)
    _decide_schedule(run, start)
    return InitialModel(architecture, str(model.folder))


def _decide_schedule(run: Config, initial: Checkpoint) -> None:
    """Compare the schedules of a Megatron checkpoint and of a run that has not begun yet."""
    state, _ = newest_state(Path(RUN.format(run=run.run)) / "training")
    if not state and (text := decide_schedule(initial, run.train)):
        print(f"tokamake: run {run.run}: {text}", file=sys.stderr)


def _model_of_child(run: Config, parent: Config, *, initial: InitialModel) -> InitialModel:
    """The model of a run that starts from another one, whose checkpoint may not exist yet."""
    source, stated = f"the last checkpoint of run {parent.run}", run.model.stated
    train, before = run.train, parent.train
    if train.finetune is False and train.load_optimizer:
        check_optimizer(before.optimizer.name, train.optimizer.name, source=source)
    step = before.num_steps  # None: its data decide
    if train.finetune is False and step is not None:
        check_progress(train, step, consumed=before.batch_sizes.samples(step), source=source)
    own = initial_architecture(initial.architecture, stated, source=source, parent=parent.run)
    check_weights_alone(initial.architecture, own, train=train, source=source)
    return InitialModel(own, str(stated or f"run {parent.run}"))


def _check_model(run: Config, initial: InitialModel, *, where: str) -> None:
    """Check formats, objective, layout and length of a run against its model."""
    _check_exports(run.convert, initial.architecture, where=where)
    with naming(where):
        check_objective(run.train, initial.architecture)
        check_layout_and_length(run.train, initial.architecture, source=initial.source)


def _check_exports(names: Iterable[str], architecture: Architecture, *, where: str) -> None:
    """Check that the model can be written in the formats that the config asks for."""
    for name in names:
        try:
            check_export_format(parse_export_format(name), architecture)
        except ValueError as error:
            raise UserError(f"{where}: convert: {name}: {error}") from None


# ---- Tokenizer ----


def find_tokenizer(runs: Mapping[str, NamedRun]) -> list[Path] | None:
    """Files of the tokenizer of the config, or else of the initial checkpoints."""
    by_run: dict[str, list[Path]] = {}
    for name, (run, where) in runs.items():
        if run.tokenizer.path:
            with naming_setting(where, "tokenizer.path"):
                return tokenizer_files(run.tokenizer.path)[1]
        if run.model.folder:
            by_run[name] = _checkpoint_tokenizer(run.model.folder, where)
    for name, files in by_run.items():
        first, first_files = next(iter(by_run.items()))
        if [path.read_bytes() for path in files] != [path.read_bytes() for path in first_files]:
            raise UserError(
                f"{runs[name].where}: model.checkpoint: {files[0]} is another tokenizer than "
                f"{first_files[0]} of run {first}, and runs share their data; name one that fits "
                "all in tokenizer.path, or build the runs from configs of their own, each with its "
                "data_set"
            )
    return next(iter(by_run.values()), None)


def _checkpoint_tokenizer(checkpoint: Path, where: str) -> list[Path]:
    """Files of a checkpoint's own tokenizer."""
    try:
        return tokenizer_files(checkpoint)[1]
    except UserError:
        raise UserError(
            f"{where}: tokenizer.path: missing: model.checkpoint {checkpoint} has no tokenizer "
            f"beside it; name the one that it was trained with{_trained_with(checkpoint)}"
        ) from None


def _trained_with(checkpoint: Path) -> str:
    """The tokenizer that run.yaml of a native checkpoint names, in parentheses."""
    runs = sorted(file for file in list_files(checkpoint) if file.name == "run.yaml")
    tokenizer = read_yaml(runs[0], "name another checkpoint").get("tokenizer") if runs else None
    return f" ({tokenizer})" if tokenizer else ""
