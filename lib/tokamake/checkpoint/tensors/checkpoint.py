"""A checkpoint that is open for reading, and the options for writing one, in any format."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture

OPTIMIZER_SETTINGS = "optimizer_settings"
"""Key of a note: the optimizer's lr of the last step, betas, eps and weight_decay."""


@dataclass(frozen=True)
class ParallelLayout:
    """Numbers of ranks that share the model of a checkpoint."""

    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: int = 1
    """Ranks that share the layers."""
    virtual_pipeline_size: int = 1
    """Stages of each pipeline rank."""
    data_parallel_size: int = 1
    """Ranks that share optimizer states."""
    zero_stage: int = 0
    """Stage of DeepSpeed's ZeRO; 0 without."""
    expert_parallel_size: int = 1
    """Ranks that share the experts of each layer."""

    def __str__(self) -> str:
        """Return the sizes above 1, e.g. tensor 2 × pipeline 4."""
        sizes = {
            "tensor": self.tensor_parallel_size,
            "pipeline": self.pipeline_parallel_size,
            "virtual pipeline": self.virtual_pipeline_size,
            "data": self.data_parallel_size,
            "expert": self.expert_parallel_size,
        }
        return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's chat templates beside the first one, in transformers."""
EXPORT_NOTES = ("eos_token_id", "bos_token_id", "generation", "dropout", "labels")
"""Notes for config.json and generation_config.json of an export; all formats keep them. `dropout`
has the rates of training: hidden, attention, embedding; `labels` the names of a task's classes."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    iteration: int = 0
    """Number of steps trained."""
    consumed_samples: int = 0
    consumed_tokens: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensors stay on disk until they are read."""

    format: str
    """Name of the format's plug-in."""
    path: Path
    """Folder of its files."""
    architecture: Architecture
    """Shape of the model, vocab_size set."""
    source: TensorSource
    """Whole tensors by key, NAME being the tensor name: weights as model.NAME, optimizer states as
    optimizer.KIND.NAME, and master weights, from which model.NAME was rounded, as master.NAME."""
    layout: ParallelLayout = ParallelLayout()
    progress: Progress = Progress()
    padded_vocab_size: int | None = None
    """Rows of the stored embedding, if it is padded to more than vocab_size."""
    unread: tuple[str, ...] = ()
    """Contents of its files that tokamake does not read, in words."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Further values that only some formats have."""
    tokenizer: tuple[Path, ...] = ()
    """Files of its tokenizer, if they lie beside the weights."""
    is_padding_unknown: bool = False
    """Whether vocab_size may include padding, because no file states the true number."""

    @property
    def stated_end_tokens(self) -> Any:
        """`eos_token_id` of generation_config.json, else of config.json: one, several, or None."""
        own = self.notes.get("eos_token_id")
        return self.notes.get("generation", {}).get("eos_token_id", own)


@dataclass(frozen=True)
class Target:
    """Options for writing a checkpoint."""

    layout: ParallelLayout = ParallelLayout()
    dtype: str | None = None
    """fp32, bf16 or fp16; None: each tensor keeps its own."""
    make_vocab_size_divisible_by: int = 128
    """Megatron pads the embedding to a multiple of this on each tensor-parallel rank."""
    tokenizer: tuple[Path, ...] = ()
    """Files of a tokenizer to copy beside the weights."""
    model_card: Path | None = None
    """Text to copy beside the weights as README.md."""
    max_shard_bytes: int = 5 * 10**9
    """Maximum size of a file, in formats that split weights by size."""
