"""Stage `convert`: convert a checkpoint between formats, layouts and dtypes, bit by bit.

The files of the target are laid out first, then filled tensor by tensor, so that memory does not
grow with the model. They grow in a folder beside the target, which is renamed last. After an
interruption, the same command continues.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import cleandoc
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from tokamake import plugins
from tokamake.config.model import (
    FORMATS,
    format_names,
    format_sizes,
    format_summaries,
    formats_with,
    formats_with_tokenizer,
)

if TYPE_CHECKING:
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target

# cyclopts lists and checks the choices of a Literal; mypy does not accept a computed one.
if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(format_names())]

_MAX_NAMED = 5
"""Number of tensors that a message names."""


def convert(
    *,
    source: Annotated[Path, Parameter(name="--from")],
    target: Annotated[Path, Parameter(name="--to")],
    format: FormatName,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    virtual_pipeline_size: int = 1,
    expert_parallel_size: int = 1,
    data_parallel_size: int = 1,
    zero_stage: Literal[0, 1, 2, 3] = 0,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    tokenizer: Path | None = None,
    generation_config: Path | None = None,
    model_card: Path | None = None,
    vocab_size: int | None = None,
    take_first_copy: bool = False,
    compare_logits: bool = False,
    workers: int = 0,
) -> None:
    """Convert a checkpoint between formats, layouts and dtypes.

    {formats}

    The format of the source is detected. After an interruption, the same command continues.

    Args:
        source: Folder of the checkpoint, its parent whose file `latest` names it, or a run's
            folder.
        target: Folder to write; it must be empty or missing.
        format: Format to write.
        tensor_parallel_size: Ranks that share each layer in the target.
        pipeline_parallel_size: Ranks that share the layers in the target.
        virtual_pipeline_size: Stages of each pipeline rank, in Megatron-LM's format.
        expert_parallel_size: Ranks that share the experts of each layer, in Megatron-LM's formats.
            With torch-dist, 2 or more writes optimizer states for any such number, 1 for none.
        data_parallel_size: Ranks that share optimizer states in the target.
        zero_stage: Stage of DeepSpeed's ZeRO for optimizer states: 1 to 3, with a pipeline 1; 0
            writes no states. With format megatron, 1 writes files of the distributed optimizer, 0
            files of each rank.
        dtype: Dtype of all tensors; by default each keeps its own.
        tokenizer: Folder or file of the tokenizer to copy into the target, with format hf; its
            end-of-document token becomes the model's end-of-text token, and its beginning-of-text
            token the model's. By default, the tokenizer beside the weights, or the tokenizer
            that the run.yaml of the checkpoint names.
        generation_config: generation_config.json to keep in the target, or its folder, such as the
            checkpoint that training started from; with format hf.
        model_card: Text to copy into the target as README.md, with format hf.
        vocab_size: Tokens in the vocabulary, if Megatron's arguments do not state it; further rows
            of the embedding are padding, which is removed. By default all rows are tokens then.
        take_first_copy: If replicated tensors differ between ranks, such as norms that drifted
            apart in training, take the first rank's; by default that is an error.
        compare_logits: With format hf, compare the logits of the written model with the
            source model before the target gets its name. transformers loads it if it is installed.
            Without enough memory for both models, a line says that this is skipped.
        workers: Threads; 0: one a core, at most 4. The output does not depend on it.
    """
    from tokamake.checkpoint import detect
    from tokamake.checkpoint.checkpoint_tokenizer import check_kept_tokenizer
    from tokamake.checkpoint.compare_logits import compare_logits as compared
    from tokamake.checkpoint.load_model import tokenizer_of_run
    from tokamake.checkpoint.megatron_model.args_reader import unknown_size_warning, with_vocab_size
    from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
    from tokamake.checkpoint.tensors.chunks import check_replicas
    from tokamake.checkpoint.writer import refuse_existing, write
    from tokamake.files import allow_open_files
    from tokamake.runtime.cores import file_workers

    sizes = {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "virtual_pipeline_size": virtual_pipeline_size,
        "expert_parallel_size": expert_parallel_size,
        "data_parallel_size": data_parallel_size,
    }
    of_hf = {
        "tokenizer": tokenizer,
        "generation-config": generation_config,
        "model-card": model_card,
        "compare-logits": compare_logits or None,
    }
    _check_options(format, sizes, of_hf=of_hf, workers=workers)
    _check_zero(format, data_parallel_size, stage=zero_stage)
    refuse_existing(target)
    allow_open_files()
    checkpoint, name = detect.open_any(source), format.replace("-", "_")
    if vocab_size is not None:
        checkpoint = with_vocab_size(checkpoint, vocab_size)
    warnings = [unknown_size_warning(checkpoint)]
    plug_in = detect.load_format(name)
    tokenizer_config = plugins.constant(FORMATS, name, "TOKENIZER_CONFIG", default="")
    if tokenizer_config and not checkpoint.tokenizer:
        tokenizer = tokenizer or tokenizer_of_run(checkpoint)
    checkpoint, tokenizer_warning = _with_side_files(
        checkpoint, tokenizer, generation_config=generation_config
    )
    workers = workers or file_workers()
    with detect.suggesting_other_step(source, checkpoint.path):
        detect.check_checksums(checkpoint, workers=workers)
        if not take_first_copy:
            check_replicas(checkpoint.source)
    copied_tokenizer = checkpoint.tokenizer if tokenizer_config else ()
    if copied_tokenizer and tokenizer is None:
        tokenizer_warning = check_kept_tokenizer(checkpoint)
    layout = ParallelLayout(**sizes, zero_stage=zero_stage)
    options = Target(layout, dtype, tokenizer=copied_tokenizer, model_card=model_card)
    check = partial(compared, checkpoint, dtype=dtype) if compare_logits else None
    result = write(target, checkpoint, name, options, workers=workers, check=check)
    step = f" at step {n:,}" if (n := checkpoint.progress.iteration) else ""
    print(f"{target}: {detect.title(name)}, {_summary(checkpoint, options)}, from {source}{step}")
    _print_side_files(checkpoint, options, config=tokenizer_config, left=result.left)
    if result.checked:
        print(result.checked)
    warnings += [tokenizer_warning, *plug_in.warnings(checkpoint)]
    for warning in (*warnings, _not_finite_warning(result.not_finite)):
        if warning:
            print(warning, file=sys.stderr)


# Python 3.13 removes the indentation of docstrings, earlier versions do not.
convert.__doc__ = cleandoc(convert.__doc__ or "").replace(
    "{formats}", fill(f"Formats: {format_summaries()}.", 96, break_on_hyphens=False)
)


def _with_side_files(
    checkpoint: "Checkpoint", tokenizer: Path | None, *, generation_config: Path | None
) -> "tuple[Checkpoint, str | None]":
    """Add a tokenizer and a generation config; return a warning about the tokenizer, too."""
    from dataclasses import replace

    from tokamake.checkpoint.hf.config_json import read_generation_config

    if generation_config is not None:
        generation = read_generation_config(generation_config)
        checkpoint = replace(checkpoint, notes={**checkpoint.notes, "generation": generation})
    if tokenizer is None:
        return checkpoint, None
    from tokamake.checkpoint.checkpoint_tokenizer import read_tokenizer

    tokens, files, warning = read_tokenizer(tokenizer, checkpoint)
    return replace(checkpoint, notes={**checkpoint.notes, **tokens}, tokenizer=files), warning


def _not_finite_warning(keys: Sequence[str]) -> str | None:
    if not keys:
        return None
    more = f" and {n:,} more" if (n := len(keys) - _MAX_NAMED) > 0 else ""
    return f"holds NaN or infinity: {', '.join(keys[:_MAX_NAMED])}{more}"


def _check_options(
    format: str, sizes: dict[str, int], *, of_hf: Mapping[str, Path | bool | None], workers: int
) -> None:
    from tokamake.errors import UserError

    if workers < 0:
        raise UserError(f"--workers {workers}: give 1 or more, or 0 for as many as there are cores")
    for name, size in sizes.items():
        option = f"--{name.replace('_', '-')} {size}"
        if size < 1:
            raise UserError(f"{option}: give 1 or more")
        if size > 1 and name not in format_sizes(format):
            raise UserError(
                f"{option}: a checkpoint of format {format} is not split this way; leave it out, "
                f"or choose {' or '.join(formats_with(name))}"
            )
    if (virtual := sizes["virtual_pipeline_size"]) > 1 == sizes["pipeline_parallel_size"]:
        raise UserError(
            f"--virtual-pipeline-size {virtual}: says how pipeline ranks share layers; give "
            "--pipeline-parallel-size, too"
        )
    for option, value in of_hf.items():
        if value is not None and format not in formats_with_tokenizer():
            shown = f"--{option}" if value is True else f"--{option} {value}"
            reason = "has no logits to compare" if value is True else "keeps none"
            raise UserError(
                f"{shown}: a checkpoint of format {format} {reason}; leave it out, or choose "
                f"{' or '.join(formats_with_tokenizer())}"
            )


def _check_zero(format: str, num_ranks: int, *, stage: int) -> None:
    from tokamake.errors import UserError

    if stage and "zero_stage" not in format_sizes(format):
        raise UserError(
            f"--zero-stage {stage}: a checkpoint of format {format} has no ZeRO partitions; "
            f"leave it out, or choose {' or '.join(formats_with('zero_stage'))}"
        )
    if num_ranks > 1 and not stage:
        raise UserError(
            f"--data-parallel-size {num_ranks}: says how ranks share optimizer states; give "
            "--zero-stage, too"
        )


def _summary(checkpoint: "Checkpoint", target: "Target") -> str:
    text = checkpoint.source.weights_summary
    return f"{text}, {target.layout}" if str(target.layout) else text


def _print_side_files(
    checkpoint: "Checkpoint", target: "Target", *, config: str, left: list[str]
) -> None:
    """Print which parts were written beside the weights, and which were left out.

    `config`: file that should name the end-of-text token; empty if the format has none.
    """
    names = ", ".join(file.name for file in checkpoint.tokenizer)
    if target.tokenizer:
        print(f"tokenizer: {names}, from {checkpoint.tokenizer[-1].parent}")
    if config and checkpoint.notes.get("eos_token_id") is None:
        print(f"{config} has no eos_token_id, as the source has none; give --tokenizer, or set it")
    left_tokenizer = [f"tokenizer ({names})"] if names and not target.tokenizer else []
    if everything := [*checkpoint.unread, *left, *left_tokenizer]:
        print(f"left behind: {', '.join(everything)}")
