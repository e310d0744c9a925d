"""The tool `convert`: a checkpoint of any format and layout becomes one of any other, bit by bit.

Files are laid out first, then filled tensor by tensor, so that memory does not grow with the model.
They grow beside the target and are renamed last; cut off, the same command goes on.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from tokamake.checkpoint.opened import Opened, Target

_TAKEN = {
    "hf": (),
    "mds": ("tensor-parallel",),
    "mds-pipeline": ("tensor-parallel", "pipeline-parallel"),
    "universal": ("pipeline-parallel",),
    "megatron": ("tensor-parallel", "pipeline-parallel", "virtual-pipeline"),
    "native": (),
}
"""Sizes that formats have."""


def convert(
    *,
    source: Annotated[Path, Parameter(name="--from")],
    target: Annotated[Path, Parameter(name="--to")],
    format: Literal["hf", "mds", "mds-pipeline", "universal", "megatron", "native"],
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    virtual_pipeline_size: int = 1,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
) -> None:
    """Convert a checkpoint between formats, layouts and number formats.

    Formats: hf (Hugging Face), mds and mds-pipeline (Megatron-DeepSpeed without and with pipeline),
    universal (DeepSpeed's, for any ZeRO stage and ranks), megatron (Megatron-LM, classic), native
    (tokamake's own, which any number of ranks reads). What it is converted from, its files tell.
    Optimizer states go along into universal and native. Cut off, the same command goes on.

    Args:
        source: Folder of the checkpoint, or one whose file `latest` names it.
        target: Folder to write; there must be nothing in it.
        format: What to write.
        tensor_parallel_size: Ranks that share each layer in what is written.
        pipeline_parallel_size: Ranks that share the layers in what is written.
        virtual_pipeline_size: Stages of each pipeline rank, in Megatron-LM's format.
        dtype: Number format of all tensors; by default each keeps its own.

    Raises:
        UserError: a file is missing or damaged, or the format cannot hold the model.
    """
    from tokamake.checkpoint.any_format import open_any, title
    from tokamake.checkpoint.copies import check_copies
    from tokamake.checkpoint.opened import Layout, Target
    from tokamake.checkpoint.written import write
    from tokamake.errors import UserError

    sizes = {
        "tensor-parallel": tensor_parallel_size,
        "pipeline-parallel": pipeline_parallel_size,
        "virtual-pipeline": virtual_pipeline_size,
    }
    for option, size in sizes.items():
        if size < 1:
            raise UserError(f"--{option}-size {size}: give 1 or more")
        if size > 1 and option not in _TAKEN[format]:
            raise UserError(
                f"--{option}-size {size}: a checkpoint of format {format} has no such parts; "
                f"leave it out, or choose {' or '.join(n for n in _TAKEN if option in _TAKEN[n])}"
            )
    if virtual_pipeline_size > 1 == pipeline_parallel_size:
        raise UserError(
            f"--virtual-pipeline-size {virtual_pipeline_size}: says how pipeline ranks share "
            "layers; give --pipeline-parallel-size, too"
        )
    checkpoint, layout = open_any(source), Layout(*sizes.values())
    check_copies(checkpoint.source)
    wanted, name = Target(layout, dtype), format.replace("-", "_")
    left = write(target, checkpoint, name, wanted)
    print(f"{target}: {title(name)}, {_told(checkpoint, wanted)}, from {source}")
    if format == "hf" and checkpoint.notes.get("eos_token_id") is None:
        print("config.json names no end-of-text token, for none is known; set its eos_token_id")
    if left := [*checkpoint.unread, *left]:
        print(f"left behind: {', '.join(left)}")


def _told(checkpoint: "Opened", target: "Target") -> str:
    from math import prod

    weights = [key for key in checkpoint.source if key.startswith("model.")]
    parameters = sum(prod(checkpoint.source.shapes[key]) for key in weights)
    told = f"{parameters:,} parameters in {len(weights)} tensors"
    return f"{told}, {target.layout}" if str(target.layout) else told
