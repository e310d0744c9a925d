"""The stage `resolve`: settings, checkpoint and index become one run, if they fit together.

Reads metadata only. Writes the run.yaml that `train` reads.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint
    from tokamake.config.training import TrainSettings


def resolve(
    *,
    settings: str,
    run: str,
    seed: int,
    checkpoint: Path | None = None,
    architecture: Path | None = None,
    parent: str | None = None,
    index: Path,
    data_root: Path,
    tokenizer: Path | None = None,
    output_folder: Path,
    output: Path,
) -> None:
    """Check that a run can start and write all its settings, defaults included.

    Args:
        settings: Training settings as JSON: the section `train` of the config.
        run: Name of the run.
        seed: Seed of all random numbers.
        checkpoint: Checkpoint to start from: its folder, or one whose file `latest` names it.
            Without it, the run starts from random weights.
        architecture: File of config/models: the shape of a new model, or the one that the
            checkpoint must agree with.
        parent: Run whose last checkpoint it is. `architecture` may then state other
            positions than the checkpoint; the file decides.
        index: Folder of sample indexes.
        data_root: Folder that the index's prefixes are relative to.
        tokenizer: Tokenizer of the datasets; a new model, fill-in-the-middle and settings about the
            ends of documents need it.
        output_folder: Folder of the run's checkpoints and metrics.
        output: The run.yaml to write.
    """
    from tokamake.config.resolved_run import Run, write_run
    from tokamake.config.training import TrainSettings
    from tokamake.config_files import parse_json, validate
    from tokamake.data.samples.index_folder import read_index
    from tokamake.preflight.run import check_resolved

    train = parse_json(TrainSettings, settings, where="train")
    index_json = read_index(index)
    steps = train.num_steps or whole_steps(train, index_json, index=index)
    train = train.model_copy(
        update={"train_steps": steps, "train_samples": None, "train_tokens": None}
    )
    if checkpoint:
        beginning = _from_checkpoint(checkpoint, train, architecture=architecture, parent=parent)
    else:
        beginning = _from_random_weights(train, architecture, tokenizer=tokenizer)
    if parent:
        start = beginning["checkpoint"]
        check_parent_tokenizer(start, parent, index_json=index_json, data_root=data_root)
    values = {
        "run": run,
        "seed": seed,
        **beginning,
        "parent": parent,
        "index": index,
        "data_root": data_root,
        "tokenizer": tokenizer,
        "eod": find_eod(train, tokenizer),
        "output": output_folder,
        "train": train.model_dump(),
    }
    resolved = validate(Run, values, "resolve")
    check_resolved(resolved, index_json)
    write_run(output, resolved)


def _from_random_weights(
    train: "TrainSettings", architecture: Path | None, *, tokenizer: Path | None
) -> dict[str, Any]:
    """Where a new model begins, as fields of `Run`."""
    from tokamake.checkpoint.random_source import new_architecture
    from tokamake.config.training import check_finetune

    check_finetune(train, start=None)
    if not architecture or not tokenizer:
        missing = "--tokenizer" if architecture else "--architecture"
        raise UserError(
            f"{missing}: missing; a new model needs it. To start from a checkpoint instead, give "
            "--checkpoint"
        )
    return {"architecture": new_architecture(architecture, tokenizer)}


def _from_checkpoint(
    checkpoint: Path, train: "TrainSettings", *, architecture: Path | None, parent: str | None
) -> dict[str, Any]:
    """Where a run that starts from a checkpoint begins, as fields of `Run`.

    The checkpoint decides the architecture; after another run, the file decides positions.
    """
    from tokamake.checkpoint.detect import open_any
    from tokamake.preflight.initial_checkpoint import check_start, initial_architecture
    from tokamake.preflight.other_family import start_note

    start = open_any(checkpoint)
    own = initial_architecture(start.architecture, architecture, source=start.path, parent=parent)
    check_start(start, train, architecture=own)
    if note := start_note(start.architecture, own, source=start.path):
        print(note)
    return {**start_fields(checkpoint, start, train=train), "architecture": own}


def check_parent_tokenizer(
    checkpoint: Path, parent: str, *, index_json: dict[str, Any], data_root: Path
) -> None:
    """Check that a run has the tokenizer of the run that it starts from."""
    from tokamake.checkpoint.native.resume_state import read_state
    from tokamake.preflight.run_record import read_record, tokenizers_of

    state = read_state(checkpoint)
    recorded = read_record(checkpoint.parent, state.digest) if state else None
    old = recorded["tokenizers"] if recorded else []
    new = tokenizers_of(index_json["pairs"], data_root)
    if old and not {*new} <= {*old}:
        raise UserError(
            f"model.checkpoint: run {parent} was trained with another tokenizer "
            f"({old[0][:12]}) than the data ({new[0][:12]}) have; train it with this one first, "
            "or give both runs the same data_set"
        )


def start_fields(
    checkpoint: Path, start: "Checkpoint", *, train: "TrainSettings"
) -> dict[str, Any]:
    """Checkpoint, step and samples that a run starts from, as fields of `Run`.

    The checkpoint is a folder of one step: `latest` may name another one later.

    Raises:
        UserError: the checkpoint must be converted, or it has been trained and train.finetune does
            not say whether to continue it.
    """
    from tokamake.config.training import check_finetune
    from tokamake.preflight.initial_checkpoint import check_native

    check_native(checkpoint, start)
    progress = start.progress
    if progress.iteration:
        check_finetune(train, start=f"{start.path} is at step {progress.iteration:,}")
    if train.finetune is not False:
        return {"checkpoint": start.path}
    return {
        "checkpoint": start.path,
        "step": progress.iteration,
        "consumed_samples": progress.consumed_samples,
    }


def whole_steps(train: "TrainSettings", index_json: dict[str, Any], *, index: Path) -> int:
    """Number of steps that the samples of an index fill; prints how many samples are left over."""
    samples = index_json["splits"]["train"]["samples"]
    sizes = train.batch_sizes
    if not (steps := sizes.whole_steps(samples)):
        raise UserError(
            f"{index}: has {samples} training samples, fewer than a global batch of "
            f"{sizes.at(0)}; state more epochs or lower train.global_batch_size"
        )
    left = samples - sizes.samples(steps)
    print(f"{index}: {samples:,} training samples: {steps:,} steps, {left:,} samples left over")
    return steps


def find_eod(train: "TrainSettings", tokenizer: Path | None) -> int | None:
    """Id of the end-of-document token, if a setting needs it."""
    from tokamake.config.training import PACKING_SETTINGS
    from tokamake.data.tokenizers import open_tokenizer

    needed_by = [name for name in PACKING_SETTINGS if getattr(train, name)]
    if not needed_by:
        return None
    eod = open_tokenizer(tokenizer).eod if tokenizer else None
    if eod is None:
        raise UserError(
            f"train.{needed_by[0]}: needs the token that ends documents; give a tokenizer that "
            "has one"
        )
    return eod
