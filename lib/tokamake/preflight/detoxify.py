"""Checks of the section `detoxify`: initial model, corpus of the kept texts, prompts, scorer."""

import sys

from tokamake.config.scorers import check_scorer_packages, open_scorer, source_digests
from tokamake.errors import UserError, naming
from tokamake.preflight.planned import WorkflowConfig


def check_detoxify(config: WorkflowConfig) -> None:
    """Check the section, as far as possible before a model exists."""
    settings, where = config.shared.detoxify, _section(config)
    if settings is None:
        return
    with naming(where):
        _check_start(config)
        _check_corpus(config)
    with naming(f"{where}.scorer"):
        source_digests(settings.scorer)
    with naming(f"{where}.prompts"):
        _ = config.num_prompts


def check_scorer(config: WorkflowConfig) -> None:
    """Check that the packages of the scorer are installed, and name a file that it still lacks."""
    assert config.shared.detoxify is not None
    scorer, where = config.shared.detoxify.scorer, f"{_section(config)}.scorer"
    with naming(where):
        check_scorer_packages(scorer)
    loaded = open_scorer(scorer)
    if hasattr(loaded, "missing_input") and (missing := loaded.missing_input()):
        print(f"tokamake: {where}: {', '.join(scorer)}: {missing}", file=sys.stderr)


def _section(config: WorkflowConfig) -> str:
    return f"{next(iter(config.named_runs.values())).where}: detoxify"


def _check_start(config: WorkflowConfig) -> None:
    """Check that all runs start from one model, and that it is trained."""
    starts = {
        str(run.model.folder or "random weights"): name
        for name, run in config.all_runs.items()
        if not run.model.parent
    }
    if len(starts) > 1:
        named = ", ".join(f"{name} from {start}" for start, name in starts.items())
        raise UserError(
            f"runs start from different models ({named}), but share the texts of one; give "
            "each model a config with its own data_set"
        )
    if "random weights" in starts:
        raise UserError(
            "runs start from random weights; name the model to detoxify in model.checkpoint, "
            "such as results/tiny/training of another config"
        )


def _check_corpus(config: WorkflowConfig) -> None:
    kept = config.data_set.kept_texts
    if all(kept not in shard.files for shard in config.plan.shards):
        raise UserError(
            f"no corpus reads {kept}, the texts to train on; add a row with this file to the "
            "table of corpora"
        )
