"""Runs of a run.yaml, or of a config of the workflow before its data exist."""

from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.config.resolved_run import ResolvedTrainSettings, Run, read_run
from tokamake.config.root import Config
from tokamake.config.runs import NamedRun, read_runs
from tokamake.config_files import read_yaml
from tokamake.errors import UserError, choice
from tokamake.preflight.initial_models import check_initial_models
from tokamake.remote.hub_models import unfetched


def read_any(path: Path, name: str | None, *, architecture: Path | None = None) -> list[Run]:
    """Runs of a run.yaml or of a config, without their data.

    Args:
        name: a run of the config's table; None: all that pretrain.
        architecture: file of the model; None: the config names it, or its checkpoint has it.
    """
    content = read_yaml(path, "give a run.yaml or a config of the workflow")
    if isinstance(content, dict) and content.keys() & {"architecture", "index", "output"}:
        runs = [read_run(path)]
        if architecture is None:
            return runs
        model = read_architecture(architecture)
        return [run.model_copy(update={"architecture": model}) for run in runs]
    named = read_runs(content or {}, str(path))
    if name is not None and name not in named:
        raise UserError(f"--run {quote(name)}: not in {path}; {choice(name, [*named])}")
    pretrained = [each for each, (config, _) in named.items() if config.finetune is None]
    chosen = [name] if name is not None else pretrained
    if not {*chosen} <= {*pretrained} or not chosen:
        raise UserError(
            f"{path}: a finetuning divides only its data among ranks; name a run that pretrains"
        )
    if architecture is not None:
        models = dict.fromkeys(named, read_architecture(architecture))
    else:
        _check_checkpoints(named)
        initial = check_initial_models(named, is_main_process=True)
        models = {name: each.architecture for name, each in initial.items()}
    return [_planned(named[each].config, models[each]) for each in chosen]


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
