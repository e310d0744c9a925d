"""Runs of a run.yaml, or of a config of the workflow before its data exist."""

from pathlib import Path

from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.config.resolved_run import ResolvedTrainSettings, Run, read_run
from tokamake.config.root import Config
from tokamake.config.runs import read_runs
from tokamake.config_files import read_yaml
from tokamake.errors import UserError, choice
from tokamake.preflight.initial_models import check_initial_models


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
        raise UserError(f"--run {name}: not in {path}; {choice(name, [*named])}")
    pretrained = [each for each, (config, _) in named.items() if config.finetune is None]
    chosen = [name] if name is not None else pretrained
    if not {*chosen} <= {*pretrained} or not chosen:
        raise UserError(
            f"{path}: a finetuning divides only its data among ranks; name a run that pretrains"
        )
    if architecture is not None:
        models = dict.fromkeys(named, read_architecture(architecture))
    else:
        initial = check_initial_models(named, is_main_process=True)
        models = {name: each.architecture for name, each in initial.items()}
    return [_planned(named[each].config, models[each]) for each in chosen]


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
