"""The stage `resolve`: brings settings, checkpoint and index together and checks that they fit.

Reads metadata only; writes the run.yaml that `train` reads.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tokamake.checkpoint.tensors.checkpoint import Checkpoint
    from tokamake.config.architecture import Architecture
    from tokamake.config.resolved_run import Run
    from tokamake.config.training import FimSettings, TrainSettings


def resolve(
    *,
    settings: str,
    run: str,
    seed: int,
    checkpoint: Path,
    architecture: Path | None = None,
    index: Path,
    data_root: Path,
    tokenizer: Path | None = None,
    output_folder: Path,
    output: Path,
) -> None:
    """Check that a run can start and write it down, every default spelled out.

    Args:
        settings: Training settings as JSON, the section `train` of the config.
        run: Name of the run.
        seed: Seed of everything random.
        checkpoint: Checkpoint to start from: its folder, or one whose file `latest` names it.
        architecture: File of config/models that it is compared with.
        index: Folder of sample indexes.
        data_root: Folder that the index's prefixes are relative to.
        tokenizer: Tokenizer of the pairs; fill-in-the-middle and what asks for ends of
            documents need it.
        output_folder: Folder of the run's checkpoints and metrics.
        output: The run.yaml to write.

    Raises:
        UserError: settings, checkpoint, index and tokenizer do not fit together.
    """
    from tokamake.config.resolved_run import Run, write_run
    from tokamake.config.training import TrainSettings
    from tokamake.data.samples.index_folder import read_index
    from tokamake.train.initial_checkpoint import open_start
    from tokamake.validation import parse_json, validate

    train = parse_json(TrainSettings, settings, "train")
    described = read_index(index)
    steps = train.num_steps or whole_steps(train, described, index)
    train = train.model_copy(
        update={"train_steps": steps, "train_samples": None, "train_tokens": None}
    )
    start = open_start(checkpoint, train, architecture)
    model = start.architecture
    check_lengths(train, model, described, index)
    train.parallel.check_architecture(model, train.sequence_length)
    check_vocabulary(model, described, data_root)
    if train.fim.rate:
        check_fim(train.fim, model, tokenizer)
    values = {
        "run": run,
        "seed": seed,
        **begin(checkpoint, start, train),
        "index": index,
        "data_root": data_root,
        "tokenizer": tokenizer,
        "eod": find_eod(train, tokenizer),
        "output": output_folder,
        "architecture": model,
        "train": train.model_dump(),
    }
    resolved = validate(Run, values, "resolve")
    check_precision(resolved.train)
    check_backend(resolved)
    write_run(output, resolved)


def begin(checkpoint: Path, start: "Checkpoint", train: "TrainSettings") -> dict[str, Any]:
    """What a run is told of its start: one checkpoint, whatever `latest` names later, and its step.

    Raises:
        UserError: the checkpoint must be converted, or has been trained and nothing says whether
            that goes on.
    """
    from tokamake.errors import UserError
    from tokamake.train.initial_checkpoint import check_native

    check_native(checkpoint, start)
    if train.finetune is None and start.progress.iteration:
        raise UserError(
            f"train.finetune: missing: {start.path} is at step {start.progress.iteration:,}; add "
            "true (its weights alone, from step 0) or false (continue it)"
        )
    if train.finetune is not False:
        return {"checkpoint": start.path}
    progress = start.progress
    return {
        "checkpoint": start.path,
        "step": progress.iteration,
        "consumed_samples": progress.consumed_samples,
    }


def whole_steps(train: "TrainSettings", described: dict[str, Any], index: Path) -> int:
    """Steps that the samples of an index give; those that fill no batch are left, and told.

    Raises:
        UserError: they do not fill one batch.
    """
    from tokamake.errors import UserError

    samples = described["splits"]["train"]["samples"]
    sizes = train.batch_sizes
    if not (steps := sizes.whole_steps(samples)):
        raise UserError(
            f"{index}: has {samples} training samples, fewer than a global batch of "
            f"{sizes.at(0)}; state more epochs or lower train.global_batch_size"
        )
    left = samples - sizes.samples(steps)
    print(f"{index}: {samples:,} training samples: {steps:,} steps, {left:,} samples left over")
    return steps


def check_lengths(
    train: "TrainSettings", architecture: "Architecture", described: dict[str, Any], index: Path
) -> None:
    """Compare sequence length and number of samples with the model and the index."""
    from tokamake.config.training import INDEX_SETTINGS
    from tokamake.errors import UserError

    length, most = train.sequence_length, architecture.max_position_embeddings
    if length > most:
        raise UserError(
            f"train.sequence_length: {length}: the model is meant for at most {most} "
            "(max_position_embeddings); lower it"
        )
    for name in INDEX_SETTINGS:
        wanted = getattr(train, name)
        if described[name] != wanted:
            raise UserError(
                f"{index}: has {name} {described[name]}, train.{name} is {wanted}; "
                "run `tokamake index` again"
            )
    needed = train.num_samples
    assert needed is not None
    found = described["splits"]["train"]["samples"] if "train" in described["splits"] else 0
    if found < needed:
        raise UserError(
            f"{index}: has {found} training samples, train.train_steps take {needed}; "
            "run `tokamake index` again"
        )


def check_layout(run: "Run", world_size: int) -> None:
    """See that model, sequences and batches can be shared by so many ranks.

    Raises:
        UserError: they cannot.
    """
    train = run.train
    data = train.parallel.data_parallel_size(world_size)
    train.batch_sizes.check(train.micro_batch_size, data)
    for size in train.batch_sizes.all:
        train.parallel.check_batches(size // (train.micro_batch_size * data))
    train.parallel.check_architecture(run.architecture, train.sequence_length)


def check_precision(train: "TrainSettings") -> None:
    """Refuse schedules that would add up gradients in low precision.

    Args:
        train: settings whose precision is decided.
    """
    from tokamake.config.parallel import SPLIT_BACKWARD
    from tokamake.errors import UserError

    parallel = train.parallel
    split = parallel.pipeline_parallel_size > 1 and parallel.pipeline_schedule in SPLIT_BACKWARD
    if split and train.precision not in ("fp32", None):
        raise UserError(
            f"train.parallel.pipeline_schedule: {parallel.pipeline_schedule}: would add up "
            f"gradients in {train.precision}; take interleaved_1f1b, or train.precision fp32"
        )


def check_backend(run: "Run", device: "torch.device | None" = None) -> None:
    """Refuse what the back end cannot do, or would do wrongly.

    Args:
        run: the resolved run.
        device: of this rank; None where it is not known yet.
    """
    from tokamake.train.backends import _deepspeed_setup

    if run.train.backend == "deepspeed":
        _deepspeed_setup.check(run, device)


def check_vocabulary(
    architecture: "Architecture", described: dict[str, Any], data_root: Path
) -> None:
    """Refuse tokens that have no row in the embedding, as far as the pairs' manifests tell."""
    from tokamake import files
    from tokamake.data.indexed.paths import manifest_path
    from tokamake.errors import UserError

    assert architecture.vocab_size is not None
    for prefix in described["pairs"]:
        path = manifest_path(data_root / prefix)
        manifest = files.read_json(path, "make the pair again") if path.is_file() else {}
        size = manifest.get("vocab_size", 0)
        if size > architecture.vocab_size:
            raise UserError(
                f"{path}: tokens of a vocabulary of {size}, the model has "
                f"{architecture.vocab_size} embeddings; take the tokenizer of the checkpoint"
            )


def find_eod(train: "TrainSettings", tokenizer: Path | None) -> int | None:
    """Token that ends documents, if settings ask where they end.

    Raises:
        UserError: there is no tokenizer, or it has no such token.
    """
    from tokamake.config.training import PACKING_SETTINGS
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.errors import UserError

    asked = [name for name in PACKING_SETTINGS if getattr(train, name)]
    if not asked:
        return None
    eod = open_tokenizer(tokenizer).eod if tokenizer else None
    if eod is None:
        raise UserError(
            f"train.{asked[0]}: needs the token that ends documents; give a tokenizer that has one"
        )
    return eod


def check_fim(fim: "FimSettings", architecture: "Architecture", tokenizer: Path | None) -> None:
    """Refuse fill-in-the-middle without its special tokens, or rows of the embedding for them."""
    from tokamake.data.samples.fim.tokens import Fim, find_tokens
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.errors import UserError

    if tokenizer is None:
        raise UserError("train.fim.rate: needs a tokenizer; give it with --tokenizer")
    opened = open_tokenizer(tokenizer)
    find_tokens(Fim(**fim.model_dump()), opened, tokenizer)
    assert architecture.vocab_size is not None
    if opened.vocab_size > architecture.vocab_size:
        raise UserError(
            f"tokenizer {tokenizer}: has {opened.vocab_size} entries, the model "
            f"{architecture.vocab_size} embeddings; take the tokenizer of the checkpoint"
        )
