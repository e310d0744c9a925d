"""A checkpoint of any format that is open for reading: what it is of, and where its tensors lie."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokamake.checkpoint.tensors.extents import TensorSource
from tokamake.config.architecture import Architecture

OPTIMIZER_SETTINGS = "optimizer_settings"
"""Note with the optimizer's settings: lr of the last step, betas, eps, weight_decay."""


@dataclass(frozen=True)
class ParallelLayout:
    """How a checkpoint's files part the model."""

    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: int = 1
    """Ranks that share the layers."""
    virtual_pipeline_size: int = 1
    """Stages of each pipeline rank."""
    data_parallel_size: int = 1
    """Ranks that share optimizer states, where there are some."""
    zero_stage: int = 0
    """What data-parallel ranks share, as DeepSpeed counts."""

    def __str__(self) -> str:
        """Sizes that part anything, for people: tensor 2 × pipeline 4."""
        sizes = {
            "tensor": self.tensor_parallel_size,
            "pipeline": self.pipeline_parallel_size,
            "virtual pipeline": self.virtual_pipeline_size,
            "data": self.data_parallel_size,
        }
        return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    iteration: int = 0
    """Steps trained."""
    consumed_samples: int = 0
    """Samples trained on."""
    consumed_tokens: int = 0
    """Tokens trained on."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of which no tensor is read yet."""

    format: str
    """Name of the plug-in in checkpoint/formats that opened it."""
    path: Path
    """Folder that its files lie in."""
    architecture: Architecture
    """Shape of the model, vocab_size filled in."""
    source: TensorSource
    """Whole tensors by Hugging Face's names of Llama: weights as model.NAME, optimizer states as
    optimizer.KIND.NAME, and master.NAME for fp32 weights that model.NAME was rounded from."""
    layout: ParallelLayout = ParallelLayout()
    """How its files part the model."""
    progress: Progress = Progress()
    """How far the run has come."""
    padded_vocab_size: int | None = None
    """Rows of the stored embedding, where there are more than vocab_size."""
    unread: tuple[str, ...] = ()
    """What its files hold besides, and is not read."""
    notes: dict[str, Any] = field(default_factory=dict)
    """More that its format tells people, in words."""
    tokenizer: tuple[Path, ...] = ()
    """Files of its tokenizer, where they lie beside the weights."""
    is_padding_unknown: bool = False
    """Whether vocab_size may count rows of padding, for nothing tells the true number."""


@dataclass(frozen=True)
class Target:
    """What a checkpoint shall be written as."""

    layout: ParallelLayout = ParallelLayout()
    """How its files shall part the model."""
    dtype: str | None = None
    """fp32, bf16 or fp16; None: as the source has each tensor."""
    make_vocab_size_divisible_by: int = 128
    """Rows of the embedding on each tensor-parallel rank are made a multiple of it (Megatron)."""
    tokenizer: tuple[Path, ...] = ()
    """Files of a tokenizer, which are put beside the weights as they are."""
    max_shard_bytes: int = 5 * 10**9
    """Size at which a file of Hugging Face's is full."""
