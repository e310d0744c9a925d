"""The model against the settings of a run: facts are the config and the model's architecture."""

from pathlib import Path

from tokamake import plugins
from tokamake.config.architecture import Architecture, objectives
from tokamake.config.objective import objective_data
from tokamake.config.root import Config
from tokamake.config.train_sections import FimSettings
from tokamake.config.training import TrainSettings
from tokamake.data.samples.fim.tokens import find_tokens
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

FAMILIES = "models/*/model"
"""Kind of the plug-ins that are model families."""


def check_objective(train: TrainSettings, architecture: Architecture) -> None:
    """Refuse an objective that the model's family or its heads do not learn."""
    if (task_head := (architecture.model_extra or {}).get("task_head", "none")) != "none":
        raise UserError(
            f"train.objective: {train.objective}: the model is finetuned: it has a head of "
            f"{task_head} in place of the one that learns this; start from the pretrained model"
        )
    known = objectives(architecture.family)
    if train.objective in known:
        objective_data(train.objective).check_model(train, architecture)
        return
    families = [name for name in plugins.names(FAMILIES) if train.objective in objectives(name)]
    choice = f", or choose a model of family {' or '.join(families)}" if families else ""
    raise UserError(
        f"train.objective: {train.objective}: family {architecture.family} learns "
        f"{' or '.join(known)}; set it to {known[0]}{choice}"
    )


def check_sequence_length(
    train: TrainSettings, architecture: Architecture, *, source: str = "the model"
) -> None:
    """Check that the model sees as many tokens as a sequence has; `source` is for the message."""
    if train.sequence_length > (limit := architecture.max_position_embeddings):
        raise UserError(
            f"train.sequence_length: {train.sequence_length}: more than the {limit} "
            f"max_position_embeddings of {source}; lower it"
        )
    objective_data(train.objective).check_lengths(train, limit, source=source)


def check_layout(train: TrainSettings, architecture: Architecture) -> None:
    """Check that ranks can share the model and its sequences."""
    train.parallel.check_architecture(architecture, train.sequence_length)
    size = train.parallel.pipeline_parallel_size
    if size > 1 and plugins.constant(
        FAMILIES, architecture.family, "HAS_AUXILIARY_LOSS", default=False
    ):
        raise UserError(
            f"train.parallel.pipeline_parallel_size: {size}: a pipeline does not carry the "
            f"auxiliary losses of {architecture.family}; set 1"
        )


def check_layout_and_length(
    train: TrainSettings, architecture: Architecture, *, source: str = "the model"
) -> None:
    """Check that a layout divides the model, and that the model sees whole sequences."""
    check_layout(train, architecture)
    check_sequence_length(train, architecture, source=source)


def check_fim(fim: FimSettings, architecture: Architecture, *, tokenizer: Path | None) -> None:
    """Refuse fill-in-the-middle if its special tokens, or their embeddings, are missing."""
    if tokenizer is None:
        raise UserError("train.fim.rate: needs a tokenizer; give it with --tokenizer")
    find_tokens(fim, open_tokenizer(tokenizer), path=tokenizer)
    check_embeddings(tokenizer, architecture)


def check_planned_fim(run: Config, where: str) -> None:
    """Check that a tokenizer that the workflow will train has the special tokens of FIM."""
    fim = run.train.fim
    tokens = [fim.prefix, fim.suffix, fim.middle, *filter(None, [fim.split_token])]
    missing = [token for token in tokens if token not in run.tokenizer.special_tokens]
    if fim.rate and missing and not run.tokenizer.has_ids:
        raise UserError(
            f"{where}: train.fim: {', '.join(missing)}: not a token of the tokenizer that is to be "
            "trained; add it to tokenizer.special_tokens"
        )


def check_embeddings(
    tokenizer: Path, architecture: Architecture, *, source: str = "the model"
) -> None:
    """Refuse a tokenizer with more entries than the model has embeddings."""
    entries = open_tokenizer(tokenizer).vocab_size
    assert architecture.vocab_size is not None
    if entries > architecture.vocab_size:
        raise UserError(
            f"tokenizer {tokenizer}: has {entries:,} entries, {source} {architecture.vocab_size:,} "
            "embeddings; use the tokenizer of the checkpoint"
        )
