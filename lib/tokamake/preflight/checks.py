"""Checks of a run before it starts: settings against model, index, tokenizer, ranks and device.

`resolve` checks what the files say (`check_resolved`). The ranks of `train`, `benchmark-train` and
`find-learning-rate` check again, with their number and their device (`check_run`). Both call the
checks of the back end (`backends/checks`). Three checks are with their subjects: the checkpoint
that a run starts from (`initial_checkpoint`), the tokenizer of its parent (`resolve`), and the
packages of trackers, which trials do not use (`tracking`). No tensor is read. Checks raise
`UserError`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import plugins
from tokamake.config.architecture import Architecture, objectives
from tokamake.config.fim import FimSettings
from tokamake.config.objective import sample_settings
from tokamake.config.parallel import SPLIT_BACKWARD
from tokamake.config.resolved_run import Run
from tokamake.config.training import BACKEND_CHECKS, INDEX_SETTINGS, TrainSettings
from tokamake.data.indexed.foreign import check_foreign, stated_vocabulary
from tokamake.data.indexed.paths import bin_path, manifest_path
from tokamake.data.samples.fim.tokens import find_tokens
from tokamake.data.samples.objective import KEY
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

if TYPE_CHECKING:
    import torch

FAMILIES = "models/*/model"
"""Kind of the plug-ins that are model families."""
IndexContent = dict[str, Any]
"""Content of an index folder's index.json."""


def check_resolved(run: Run, index: IndexContent) -> None:
    """Check a run against its files, before the number of ranks and the device are known."""
    check_index(run, index)
    check_objective(run.train, run.architecture)
    run.train.parallel.check_architecture(run.architecture, run.train.sequence_length)
    check_vocabulary(run.architecture, index, data_root=run.data_root)
    if run.train.fim.rate:
        check_fim(run.train.fim, run.architecture, tokenizer=run.tokenizer)
    check_precision(run.train)
    check_backend(run)


def check_run(
    run: Run, *, index: IndexContent | None, world_size: int, device: "torch.device"
) -> None:
    """Check a run on the ranks that are about to train it.

    Args:
        run: the resolved run, with its precision chosen.
        index: content of its index.json; None: the run reads no samples.
        world_size: number of ranks.
        device: device of this rank.
    """
    if index is not None:
        check_index(run, index)
    check_objective(run.train, run.architecture)
    check_on_ranks(run, world_size=world_size, device=device)


def check_on_ranks(run: Run, *, world_size: int, device: "torch.device") -> None:
    """Check a run against its ranks and their device; runs that finetune, too.

    Args:
        run: the resolved run, with its precision chosen.
        world_size: number of ranks.
        device: device of this rank.
    """
    check_layout(run, world_size)
    check_auxiliary_loss(run)
    check_precision(run.train)
    check_backend(run, device)
    check_deterministic(run, device)


def check_index(run: Run, index: IndexContent) -> None:
    """Compare sequence length, index settings and number of samples with model and index."""
    train = run.train
    check_sequence_length(train, run.architecture)
    for name in INDEX_SETTINGS:
        setting = getattr(train, name)
        if index[name] != setting:
            raise UserError(
                f"{run.index}: has {name} {index[name]}, train.{name} is {setting}; "
                "run `tokamake index` again"
            )
    check_samples_objective(run, index)
    assert train.num_samples is not None, "a resolved run has a length"
    num_samples = num_training_samples(index)
    if num_samples < train.num_samples:
        raise UserError(
            f"{run.index}: has {num_samples} training samples, train.train_steps take "
            f"{train.num_samples}; run `tokamake index` again"
        )


def check_samples_objective(run: Run, index: IndexContent) -> None:
    """Compare the objective of the samples of an index, and their masking, with the run's."""
    train, remedy = run.train, "run `tokamake index` again"
    stated = index.get(KEY, {})
    name = stated.get("name", "causal")
    if name != train.objective:
        raise UserError(
            f"{run.index}: has samples of objective {name}, train.objective is {train.objective}; "
            f"{remedy}"
        )
    for key, setting in sample_settings(train).items() if stated else ():
        if stated[key] != setting:
            raise UserError(
                f"{run.index}: has {key} {stated[key]}, train.masking gives {setting}; {remedy}"
            )


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


def num_training_samples(index: IndexContent) -> int:
    return index["splits"]["train"]["samples"] if "train" in index["splits"] else 0


def check_layout(run: Run, world_size: int) -> None:
    """Check that the ranks can share the model, its sequences and its batches."""
    check_ranks(run.train, world_size)
    run.train.parallel.check_architecture(run.architecture, run.train.sequence_length)


def check_auxiliary_loss(run: Run) -> None:
    """Refuse a pipeline for a family whose layers have auxiliary losses."""
    model = plugins.load(FAMILIES, run.architecture.family).Model
    size = run.train.parallel.pipeline_parallel_size
    if model.has_auxiliary_loss and size > 1:
        raise UserError(
            f"train.parallel.pipeline_parallel_size: {size}: a pipeline does not carry the "
            f"auxiliary losses of {run.architecture.family}; set 1"
        )


def check_ranks(train: TrainSettings, world_size: int) -> None:
    """Check that the sizes of the mesh and the batches fit the number of ranks."""
    data_parallel_size = train.parallel.data_parallel_size(world_size)
    train.batch_sizes.check(train.micro_batch_size, data_parallel_size)
    for size in train.batch_sizes.all:
        num_batches = size // (train.micro_batch_size * data_parallel_size)
        in_rampup = size < train.global_batch_size
        train.parallel.check_batches(num_batches, in_rampup=in_rampup)


def check_precision(train: TrainSettings) -> None:
    """Refuse pipeline schedules that would add up gradients in low precision."""
    parallel = train.parallel
    split = parallel.pipeline_parallel_size > 1 and parallel.pipeline_schedule in SPLIT_BACKWARD
    if split and train.precision not in ("fp32", None):
        raise UserError(
            f"train.parallel.pipeline_schedule: {parallel.pipeline_schedule}: would add up "
            f"gradients in {train.precision}; use interleaved_1f1b, or train.precision fp32"
        )


def check_backend(run: Run, device: "torch.device | None" = None) -> None:
    """Refuse what the back end cannot do, or would do wrongly.

    Args:
        run: the resolved run.
        device: device of this rank; None where it is not known yet.
    """
    checks = plugins.load(BACKEND_CHECKS, run.train.backend)
    checks.check_run(run, device.type if device is not None else None)


def check_deterministic(run: Run, device: "torch.device") -> None:
    """Refuse an optimizer that has no deterministic algorithm on a device."""
    optimizer = run.train.optimizer
    if run.train.deterministic and device.type != "cpu" and optimizer.facts.sampled_labels:
        raise UserError(
            f"train.deterministic: labels that {optimizer.name} draws need cumulative sums, which "
            f"torch has no deterministic algorithm for on {device.type}; set it to false, or use "
            "another optimizer"
        )


def check_vocabulary(architecture: Architecture, index: IndexContent, *, data_root: Path) -> None:
    """Refuse tokens without a row in the embedding.

    The vocabulary in a dataset's manifest bounds its tokens. For other datasets, `index` notes the
    largest token; if an earlier version made the index, it is read from the dataset here.
    """
    assert architecture.vocab_size is not None
    embeddings = f"the model has {architecture.vocab_size} embeddings"
    largest_tokens = index.get("largest_tokens", {})
    for prefix in index["pairs"]:
        dataset = data_root / prefix
        if (size := stated_vocabulary(dataset)) is not None:
            if size > architecture.vocab_size:
                raise UserError(
                    f"{manifest_path(dataset)}: tokens of a vocabulary of {size}, {embeddings}; "
                    "use the tokenizer of the checkpoint"
                )
            continue
        largest = largest_tokens[prefix] if prefix in largest_tokens else check_foreign(dataset)
        if largest >= architecture.vocab_size:
            raise UserError(
                f"{bin_path(dataset)}: holds token {largest}, {embeddings}; tokenize again with "
                "the tokenizer of the checkpoint"
            )


def check_fim(fim: FimSettings, architecture: Architecture, *, tokenizer: Path | None) -> None:
    """Refuse fill-in-the-middle if its special tokens, or their embeddings, are missing."""
    if tokenizer is None:
        raise UserError("train.fim.rate: needs a tokenizer; give it with --tokenizer")
    find_tokens(fim, open_tokenizer(tokenizer), path=tokenizer)
    check_embeddings(tokenizer, architecture)


def check_embeddings(tokenizer: Path, architecture: Architecture) -> None:
    """Refuse a tokenizer with more entries than the model has embeddings."""
    entries = open_tokenizer(tokenizer).vocab_size
    assert architecture.vocab_size is not None
    if entries > architecture.vocab_size:
        raise UserError(
            f"tokenizer {tokenizer}: has {entries:,} entries, the model {architecture.vocab_size:,}"
            " embeddings; use the tokenizer of the checkpoint"
        )


def check_until_step(run: Run, until_step: int | None) -> None:
    """Check that the step at which this job ends, if any, lies within the run."""
    if until_step is not None and not run.step < until_step <= run.train.train_steps:
        raise UserError(
            f"until_step: {until_step}: the run goes from step {run.step} to "
            f"{run.train.train_steps}; give one between them"
        )


def step_of_samples(run: Run, samples: int) -> int:
    """Last step of a job that ends before it consumes more samples than these.

    Raises:
        UserError: they are not within the run.
    """
    first, last = run.consumed_samples, run.train.batch_sizes.samples(run.train.train_steps)
    if first < samples <= last:
        step = run.train.batch_sizes.whole_steps(samples)
        if step > run.step:
            return step
    length = run.train.sequence_length
    raise UserError(
        f"until_samples: {samples} ({samples * length:,} tokens): the run goes from {first} to "
        f"{last} samples, {run.train.global_batch_size} a step; give a number in it, at least one "
        "step"
    )


def check_updated(run: Run, *, step: int, updates: int | None) -> None:
    """Check that the weights of a finished run are not those that it began with.

    Args:
        run: the resolved run.
        step: where it stands.
        updates: steps that have updated the weights; None if that is not known.

    Raises:
        UserError: it is at its end, and no step has updated them.
    """
    if updates != 0 or not run.step < step == run.train.train_steps:
        return
    reason = "the loss or the gradient norm was never finite; lower train.optimizer.learning_rate"
    if run.train.precision == "fp16":
        reason = "gradients always overflowed; lower train.loss_scaling.initial_scale"
    if run.train.skip_data:
        reason += ", and check train.skip_data"
    raise UserError(
        f"{run.output}: no step has updated the weights: {reason}. Set train.on_change to restart, "
        "and start again"
    )


def check_trial_samples(run: Run, index: IndexContent, *, num_steps: int) -> None:
    """Check that the index has enough training samples for a trial."""
    num_samples, needed = num_training_samples(index), num_steps * run.train.global_batch_size
    if num_samples < needed:
        raise UserError(
            f"{run.index}: has {num_samples} training samples, {num_steps} steps take "
            f"{needed}; lower --steps"
        )
