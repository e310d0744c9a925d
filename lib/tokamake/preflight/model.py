"""The model against the settings of a run: facts are the config and the model's architecture."""

from pathlib import Path

from tokamake import plugins
from tokamake.config.architecture import Architecture, objectives
from tokamake.config.fim import FimSettings
from tokamake.config.objective import sample_settings
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
        _check_sentence_order(train, architecture)
        return
    others = [name for name in plugins.names(FAMILIES) if train.objective in objectives(name)]
    choice = f", or choose a model of family {' or '.join(others)}" if others else ""
    raise UserError(
        f"train.objective: {train.objective}: family {architecture.family} learns "
        f"{' or '.join(known)}; set it to {known[0]}{choice}"
    )


def _check_sentence_order(train: TrainSettings, architecture: Architecture) -> None:
    """Check that samples have an order of sentences if the model has a head for it."""
    has_head = (architecture.model_extra or {}).get("sentence_order_head")
    has_order = train.masking.sentence_order
    if train.objective == "masked" and has_head not in (None, has_order):
        raise UserError(
            f"train.masking.sentence_order: {str(has_order).lower()}: the model has "
            f"{'a' if has_head else 'no'} head for the order of sentences; set it to "
            f"{str(has_head).lower()}, or choose a model with another sentence_order_head"
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
    if train.objective != "span_corruption":
        return
    length = sample_settings(train)["decoder_sequence_length"]
    # Sequence parallelism pads the decoder to a multiple of its ranks.
    parallel = train.parallel
    multiple = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    if -(-length // multiple) * multiple > limit:
        raise UserError(
            f"train.masking.decoder_sequence_length: {length}: more than the {limit} "
            f"max_position_embeddings of {source}; lower it"
        )


def check_layout_and_length(
    train: TrainSettings, architecture: Architecture, *, source: str = "the model"
) -> None:
    """Check that a layout divides the model, and that the model sees whole sequences."""
    train.parallel.check_architecture(architecture, train.sequence_length)
    check_sequence_length(train, architecture, source=source)


def check_fim(fim: FimSettings, architecture: Architecture, *, tokenizer: Path | None) -> None:
    """Refuse fill-in-the-middle if its special tokens, or their embeddings, are missing."""
    if tokenizer is None:
        raise UserError("train.fim.rate: needs a tokenizer; give it with --tokenizer")
    find_tokens(fim, open_tokenizer(tokenizer), path=tokenizer)
    check_embeddings(tokenizer, architecture)


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
