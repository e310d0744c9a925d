"""Load the model of a checkpoint of any format, and find its tokenizer: for inference."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokamake.checkpoint.detect import suggesting_other_step
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.config_files import read_yaml
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tokamake.config.resolved_run import Run


_MAX_DEFAULT_LENGTH = 4096
"""A longer context may not fit into memory."""


class LoadedModel(NamedTuple):
    """A model in fp32 that predicts tokens."""

    checkpoint: Checkpoint
    """Checkpoint that it was loaded from."""
    model: "nn.Module"
    """Takes (B, L) tokens, returns (B, L, V) logits."""
    device: "torch.device"
    """Device of the model."""


def verify(checkpoint: Checkpoint, *, rank: int = 0, world_size: int = 1) -> None:
    """Compare the weights of a checkpoint with the checksums that its files have."""
    from tokamake.checkpoint.detect import check_checksums
    from tokamake.runtime.cores import file_workers

    with suggesting_other_step(checkpoint.path, checkpoint.path):
        check_checksums(checkpoint, workers=file_workers(), rank=rank, world_size=world_size)


def load_model(checkpoint: Checkpoint) -> LoadedModel:
    """Read a checkpoint's weights, and verify the checksums that its files have."""
    from tokamake.checkpoint import model_tensors
    from tokamake.runtime.process_group import choose_device
    from tokamake.runtime.ranks import Ranks

    verify(checkpoint)
    source, architecture = checkpoint.source, checkpoint.architecture.without_mtp
    weights = {
        key.removeprefix("model."): source.read(key).contiguous()
        for key in model_tensors.weight_shapes(architecture)
    }
    device = choose_device(Ranks(rank=0, world_size=1, local_rank=0, local_size=1))
    model = model_tensors.to_model(architecture, weights).float().to(device).eval()
    return LoadedModel(checkpoint, model, device)


def run_of(checkpoint: Checkpoint) -> "Run | None":
    """The run that saved a checkpoint; None: another program did, or its run.yaml is lost."""
    path = checkpoint.path / "run.yaml"
    if not path.is_file():
        return None
    # The settings of a run take long to import, and most conversions need none.
    from tokamake.config.resolved_run import read_run

    return read_run(path)


def tokenizer_of(
    checkpoint: Checkpoint, given: Path | None, *, option: str = "--tokenizer"
) -> Tokenizer:
    """Open a model's tokenizer: the given one, else the weights' own, else run.yaml's.

    Args:
        option: name of the option or setting that gives it, for messages.
    """
    path = given or stated_tokenizer(checkpoint, option)
    tokenizer = open_tokenizer(path)
    vocab_size = checkpoint.architecture.vocab_size or 0
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"{checkpoint.path}: its vocabulary has {vocab_size} entries, the tokenizer {path} "
            f"{tokenizer.vocab_size}; give the tokenizer that the model was trained with"
        )
    return tokenizer


def sequence_length_of(checkpoint: Checkpoint, given: int | None) -> int:
    """Input tokens of a model: as given, as in its training, or part of its context."""
    longest = checkpoint.architecture.max_position_embeddings
    if given is not None:
        if given > longest:
            raise UserError(
                f"sequence_length: {given}: the model of {checkpoint.path} sees only {longest} "
                "tokens; lower it"
            )
        return given
    if run := run_of(checkpoint):
        return run.train.sequence_length
    return min(longest, _MAX_DEFAULT_LENGTH)


def end_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a continuation: the tokenizer's, and the checkpoint's."""
    stated = checkpoint.stated_end_tokens
    tokens = stated if isinstance(stated, list) else [stated]
    known = range(tokenizer.vocab_size)
    return frozenset([tokenizer.eod, *(token for token in tokens if token in known)])


def tokenizer_of_run(checkpoint: Checkpoint) -> Path | None:
    """The tokenizer that a checkpoint's run.yaml names; None: it names none, or it is lost."""
    stated = _named_by_run(checkpoint)
    places = _places(*stated, checkpoint=checkpoint) if stated else ()
    return next((path for path in places if path.exists()), None)


def _named_by_run(checkpoint: Checkpoint) -> tuple[Path, Path] | None:
    """The tokenizer that the run of a checkpoint names, and the folder of the checkpoint there."""
    if run := run_of(checkpoint):
        return (run.tokenizer, run.output) if run.tokenizer else None
    # Checkpoints of a finetuning have no run.yaml; the run's is in the folder above them.
    folder = checkpoint.path.resolve().parent
    path = folder.parent / "run.yaml"
    if not path.is_file() or not (checkpoint.path / "finetune.json").is_file():
        return None
    run = read_yaml(path, "write it again with `tokamake prepare-finetune`")
    if not isinstance(run, dict) or not {"tokenizer", "output"} <= {*run}:
        return None
    return Path(run["tokenizer"]), Path(run["output"]).with_name(folder.name)


def stated_tokenizer(checkpoint: Checkpoint, option: str = "--tokenizer") -> Path:
    """A model's tokenizer: the weights' own, else run.yaml's.

    Args:
        option: name of the option or setting that gives another one, for messages.
    """
    if checkpoint.tokenizer:
        return checkpoint.path
    if path := tokenizer_of_run(checkpoint):
        return path
    if not (stated := _named_by_run(checkpoint)):
        raise UserError(f"{checkpoint.path}: has no tokenizer; name one with {option}")
    raise UserError(
        f"{checkpoint.path}: its run.yaml names the tokenizer {stated[0]}, which is missing; "
        f"name it with {option}"
    )


def _places(path: Path, output: Path, *, checkpoint: Checkpoint) -> Iterator[Path]:
    """Where a path of a run.yaml may be: relative to this folder, or to the workflow's."""
    yield path
    parts, folder = output.parts, checkpoint.path.resolve().parent.parts
    if folder[-len(parts) :] == parts:
        yield Path(*folder[: -len(parts)], path)
