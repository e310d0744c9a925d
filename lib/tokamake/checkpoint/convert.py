"""Stage `convert`: a checkpoint of any format and layout becomes one of any other, bit by bit.

Files are laid out first, then filled tensor by tensor, so that memory does not grow with the model.
They grow beside the target and are renamed last; cut off, the same command goes on.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from tokamake.config.model import format_names, format_sizes, formats_with

if TYPE_CHECKING:
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target

# cyclopts lists and checks the choices of a Literal; mypy does not accept a computed one.
if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(format_names())]

_NAMED = 5
"""Tensors that a message names."""
_BESIDE = ("added_tokens.json", "chat_template.jinja")
"""Files beside a tokenizer that transformers takes for its own."""


def convert(
    *,
    source: Annotated[Path, Parameter(name="--from")],
    target: Annotated[Path, Parameter(name="--to")],
    format: FormatName,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    virtual_pipeline_size: int = 1,
    data_parallel_size: int = 1,
    zero_stage: Literal[0, 1, 2, 3] = 0,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    take_first_copy: bool = False,
    workers: int = 0,
) -> None:
    """Convert a checkpoint between formats, layouts and number formats.

    Formats: hf (Hugging Face), mds and mds-pipeline (Megatron-DeepSpeed without and with pipeline),
    universal (DeepSpeed's, for any ZeRO stage and ranks), megatron (Megatron-LM, classic), native
    (tokamake's own, which any number of ranks reads). What it is converted from, its files tell.
    Optimizer states go along into universal and native, those of Adam into megatron, too, and with
    --zero-stage into mds and mds-pipeline; a tokenizer beside Hugging Face's weights into hf. Cut
    off, the same command goes on.

    Args:
        source: Folder of the checkpoint, or one whose file `latest` names it.
        target: Folder to write; there must be nothing in it.
        format: What to write.
        tensor_parallel_size: Ranks that share each layer in what is written.
        pipeline_parallel_size: Ranks that share the layers in what is written.
        virtual_pipeline_size: Stages of each pipeline rank, in Megatron-LM's format.
        data_parallel_size: Ranks that share optimizer states in what is written.
        zero_stage: Stage of DeepSpeed's ZeRO whose optimizer states are written: 1 to 3, in a
            pipeline 1; 0 writes none.
        dtype: Number format of all tensors; by default each keeps its own.
        tokenizer: Folder or file of the tokenizer to put beside the weights, with format hf; its
            end-of-document token becomes the model's end-of-text token.
        vocab_size: Tokens in the vocabulary, where Megatron's arguments do not tell; rows of the
            embedding beyond them are padding, and left. By default all rows are tokens there.
        take_first_copy: Where ranks differ in what they should have alike, such as norms that
            drifted apart in training, take the first rank's; by default that is an error.
        workers: Threads; 0: as many as there are cores, but no more than 4. What is written does
            not depend on it.

    Raises:
        UserError: a file is missing or damaged, the format cannot hold the model, or the tokenizer
            is too large for it.
    """
    from dataclasses import replace

    from tokamake.checkpoint.checksums import check_checksums
    from tokamake.checkpoint.detect import open_any, suggesting_other_step, title
    from tokamake.checkpoint.megatron.optimizer_writer import left_states
    from tokamake.checkpoint.megatron_model.arguments import warnings
    from tokamake.checkpoint.megatron_model.vocabulary import unknown_size, with_vocab_size
    from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
    from tokamake.checkpoint.tensors.replicas import check_copies
    from tokamake.checkpoint.writer import refuse_other, write
    from tokamake.files import allow_open_files
    from tokamake.runtime.cores import file_workers

    sizes = {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "virtual_pipeline_size": virtual_pipeline_size,
        "data_parallel_size": data_parallel_size,
    }
    _check_options(format, sizes, tokenizer, workers)
    _check_zero(format, data_parallel_size, zero_stage)
    refuse_other(target)
    allow_open_files()
    checkpoint, name = open_any(source), format.replace("-", "_")
    if vocab_size is not None:
        checkpoint = with_vocab_size(checkpoint, vocab_size)
    unknown = unknown_size(checkpoint)
    if tokenizer is not None:
        token, files = _end_and_files(tokenizer, checkpoint)
        notes = {**checkpoint.notes, "eos_token_id": token}
        checkpoint = replace(checkpoint, notes=notes, tokenizer=files)
    workers = workers or file_workers()
    with suggesting_other_step(source, checkpoint.path):
        check_checksums(checkpoint.source, workers=workers)
        if not take_first_copy:
            check_copies(checkpoint.source)
    kept = checkpoint.tokenizer if format == "hf" else ()
    wanted = Target(ParallelLayout(**sizes, zero_stage=zero_stage), dtype, tokenizer=kept)
    found = write(target, checkpoint, name, wanted, workers=workers)
    print(f"{target}: {title(name)}, {_told(checkpoint, wanted)}, from {_at(source, checkpoint)}")
    _tell_rest(checkpoint, wanted, format, found.left)
    states = left_states(checkpoint) if format == "megatron" else None
    told = warnings(checkpoint.architecture, format)
    for line in (unknown, states, *told, _unsound(found.unsound)):
        if line:
            print(line, file=sys.stderr)


def _unsound(keys: Sequence[str]) -> str | None:
    """What to tell of tensors that hold numbers which are none."""
    if not keys:
        return None
    more = f" and {left:,} more" if (left := len(keys) - _NAMED) > 0 else ""
    return f"holds NaN or infinity: {', '.join(keys[:_NAMED])}{more}"


def _check_options(
    format: str, sizes: dict[str, int], tokenizer: Path | None, workers: int
) -> None:
    """See that a format has what is asked for.

    Raises:
        UserError: it has not.
    """
    from tokamake.errors import UserError

    if workers < 0:
        raise UserError(f"--workers {workers}: give 1 or more, or 0 for as many as there are cores")
    for name, size in sizes.items():
        option = f"--{name.replace('_', '-')} {size}"
        if size < 1:
            raise UserError(f"{option}: give 1 or more")
        if size > 1 and name not in format_sizes(format):
            others = " or ".join(formats_with(name))
            raise UserError(
                f"{option}: a checkpoint of format {format} has no such parts; leave it out, or "
                f"choose {others}"
            )
    if (virtual := sizes["virtual_pipeline_size"]) > 1 == sizes["pipeline_parallel_size"]:
        raise UserError(
            f"--virtual-pipeline-size {virtual}: says how pipeline ranks share layers; give "
            "--pipeline-parallel-size, too"
        )
    if tokenizer is not None and format != "hf":
        raise UserError(
            f"--tokenizer {tokenizer}: a checkpoint of format {format} keeps none; leave it out, "
            "or choose hf"
        )


def _check_zero(format: str, ranks: int, stage: int) -> None:
    """See that a format holds optimizer states in such parts.

    Raises:
        UserError: it does not.
    """
    from tokamake.errors import UserError

    if stage and "zero_stage" not in format_sizes(format):
        others = " or ".join(formats_with("zero_stage"))
        raise UserError(
            f"--zero-stage {stage}: a checkpoint of format {format} has no shards of DeepSpeed's; "
            f"leave it out, or choose {others}"
        )
    if ranks > 1 and not stage:
        raise UserError(
            f"--data-parallel-size {ranks}: says how ranks share optimizer states; give "
            "--zero-stage, too"
        )


def _end_and_files(tokenizer: Path, checkpoint: "Checkpoint") -> tuple[int, tuple[Path, ...]]:
    """A tokenizer's end-of-document token, its files, and those that tell transformers its use.

    Raises:
        UserError: there is none, or it has more entries than the model.
    """
    from tokamake.data.tokenizers import open_tokenizer, tokenizer_files, with_configs
    from tokamake.errors import UserError

    opened, vocab_size = open_tokenizer(tokenizer), checkpoint.architecture.vocab_size
    assert vocab_size is not None, "a checkpoint has its vocabulary's size"
    if opened.vocab_size > vocab_size:
        raise UserError(
            f"--tokenizer {tokenizer}: has {opened.vocab_size:,} entries, the model of "
            f"{checkpoint.path} has {vocab_size:,}; give the tokenizer that it was trained with"
        )
    own = tokenizer_files(tokenizer)[1]
    others = (own[0].with_name(name) for name in _BESIDE)
    return opened.eod, (*sorted({*with_configs(own), *filter(Path.is_file, others)}),)


def _told(checkpoint: "Checkpoint", target: "Target") -> str:
    from math import prod

    weights = [key for key in checkpoint.source if key.startswith("model.")]
    parameters = sum(prod(checkpoint.source.shapes[key]) for key in weights)
    told = f"{parameters:,} parameters in {len(weights)} tensors"
    return f"{told}, {target.layout}" if str(target.layout) else told


def _at(source: Path, checkpoint: "Checkpoint") -> str:
    step = checkpoint.progress.iteration
    return f"{source} at step {step:,}" if step else f"{source}"


def _tell_rest(checkpoint: "Checkpoint", target: "Target", format: str, left: list[str]) -> None:
    """Say what came beside the weights, and what did not.

    Args:
        checkpoint: that was converted.
        target: what into.
        format: of it.
        left: kinds of tensors that it does not hold.
    """
    names = ", ".join(file.name for file in checkpoint.tokenizer)
    if target.tokenizer:
        print(f"tokenizer: {names}, from {checkpoint.tokenizer[0].parent}")
    if format == "hf" and checkpoint.notes.get("eos_token_id") is None:
        print("config.json names no end-of-text token, for none is known; set its eos_token_id")
    rest = [f"tokenizer ({names})"] if names and not target.tokenizer else []
    if every := [*checkpoint.unread, *left, *rest]:
        print(f"left behind: {', '.join(every)}")
