"""Runs of a run.yaml, or of a config of the workflow before its data exist."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.config.fields import dotted
from tokamake.config.overrides import merged, read_overrides
from tokamake.config.resolved_run import ResolvedTrainSettings, Run, read_run
from tokamake.config.root import Config
from tokamake.config.runs import NamedRun, read_runs
from tokamake.config_files import read_yaml
from tokamake.errors import UserError, choice, naming, naming_overrides
from tokamake.finetune.finetune_run import FinetuneRun, read_finetune_run
from tokamake.preflight.finetune import finetuned_architecture
from tokamake.preflight.initial_models import ancestors, check_initial_models
from tokamake.preflight.model import check_layout_and_length
from tokamake.preflight.run import check_some_ranks
from tokamake.remote.hub_models import unfetched

_ROWS = 1000
"""Rows of a task, whose files are not read: a miniature has a length of its own."""


def read_any(
    path: Path,
    name: str | None,
    *,
    settings: Iterable[str] = (),
    architecture: Path | None = None,
) -> list[Run]:
    """Runs of a run.yaml or of a config, without their data.

    Args:
        name: a run of the config's table; None: all of them.
        settings: settings that replace values of the config, such as `train.train_steps=50`.
        architecture: file of the model; None: the config names it, or its checkpoint has it.
    """
    content = read_yaml(path, "give a run.yaml or a config of the workflow")
    overrides = read_overrides(settings)
    if isinstance(content, dict) and content.keys() & {"architecture", "index"}:
        if overrides:
            raise UserError(
                f"{next(iter(dotted(overrides)))}: {path} is the result of a config; give settings "
                "with the config itself"
            )
        run = _resolved(path, architecture, finetunes="finetune" in content)
        if name is not None and name != run.run:
            raise UserError(f"--run {quote(name)}: {path} is of {run.run}; leave --run out")
        with naming(str(path)):
            return [_checked(run, architecture or path)]
    values = merged(content, overrides) if isinstance(content, dict) else content or {}
    with naming_overrides(str(path), dotted(overrides)):
        return _read_runs(values, path, name=name, architecture=architecture)


def _read_runs(
    values: dict[str, Any], path: Path, *, name: str | None, architecture: Path | None
) -> list[Run]:
    """Runs of a config, without their data."""
    named = read_runs(values, str(path))
    if name is not None and name not in named:
        raise UserError(f"--run {quote(name)}: not in {path}; {choice(name, [*named])}")
    if architecture is not None:
        model = read_architecture(architecture)
        models = dict.fromkeys(named, model)
    else:
        if name is not None:  # another run's checkpoint may be missing
            named = {each: named[each] for each in ancestors(name, named)}
        _check_checkpoints(named)
        initial = check_initial_models(named, is_main_process=True)
        models = {each: found.architecture for each, found in initial.items()}
    runs = []
    for each in named if name is None else [name]:
        config, where = named[each]
        with naming(where):
            runs.append(_checked(_planned(config, models[each]), architecture or path))
    return runs


def _checked(run: Run, source: Path) -> Run:
    """Check that a layout divides the run's own model and batches, not only those in miniature."""
    check_layout_and_length(run.train, run.architecture, source=str(source))
    check_some_ranks(run.train)
    return run


def _resolved(path: Path, architecture: Path | None, *, finetunes: bool) -> Run:
    """The run of a run.yaml, with another model if one is given."""
    model = None if architecture is None else read_architecture(architecture)
    if not finetunes:
        run = read_run(path)
        return run if model is None else run.model_copy(update={"architecture": model})
    finetuning = read_finetune_run(path)
    if model is not None:
        with_head = finetuned_architecture(model, finetuning.finetune.task)
        finetuning = finetuning.model_copy(update={"architecture": with_head})
    return finetuning.resolved(_ROWS)


def _check_checkpoints(named: Mapping[str, NamedRun]) -> None:
    """Check that checkpoints are on this machine: nothing else says what their models are."""
    for config, where in named.values():
        folder = config.model.folder
        if folder and not folder.exists() and not unfetched(folder):
            raise UserError(
                f"{where}: model.checkpoint: {folder}: no such folder; give the folder of a "
                "checkpoint or, if it is on another machine, the file of its model, as in "
                "--architecture config/models/llama2-7b.yaml"
            )


def _planned(config: Config, architecture: Architecture) -> Run:
    if config.finetune is not None:
        return FinetuneRun(
            run=config.run,
            seed=config.seed,
            checkpoint=Path(),
            pretrained=Path(),
            new_tensors=(),
            dropped_tensors=(),
            tokenizer=Path(),
            output=Path(),
            architecture=finetuned_architecture(architecture, config.finetune.task),
            train=config.train,
            finetune=config.finetune,
        ).resolved(_ROWS)
    lengths = {"train_steps": 1000, "train_samples": None, "train_tokens": None}
    return Run(
        run=config.run,
        seed=config.seed,
        index=Path(),
        data_root=Path(),
        output=Path(),
        eod=0,
        architecture=architecture,
        train=ResolvedTrainSettings.model_validate(config.train.model_dump() | lengths),
    )
