"""Settings of the model: where training starts from, and what the trained model is written as."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, model_validator

from tokamake.config.architecture import Architecture
from tokamake.config.fields import Settings

FORMAT_SIZES = {
    "hf": (),
    "mds": ("tensor_parallel_size", "data_parallel_size", "zero_stage"),
    "mds-pipeline": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "zero_stage",
    ),
    "universal": ("pipeline_parallel_size",),
    "megatron": ("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_size"),
    "native": (),
}
"""Formats of checkpoints that are written: the sizes that each has."""
_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_size",
    "dp": "data_parallel_size",
    "zero": "zero_stage",
}
ADAMS = ("adam", "adamw")
"""Optimizers whose states a zero_stage can be of."""
_DTYPES = ("fp32", "bf16", "fp16")


class ModelSettings(Settings):
    """Where training starts from: a checkpoint, or random weights."""

    architecture: Literal["from_checkpoint"] | Path | None = Path("config/models/tiny-llama.yaml")
    """Shape of the model: a file, which a checkpoint is compared with, or from_checkpoint, which is
    usual where there is one; its vocab_size, if empty, is the checkpoint's or the tokenizer's."""
    checkpoint: Path | None = None
    """Folder of a checkpoint to start from, of any format that `tokamake inspect` knows, or one
    whose file `latest` names it; train.finetune says how. Empty: random weights."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_checkpoint(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("checkpoint") is not None:
            return {**values, "architecture": values.get("architecture") or "from_checkpoint"}
        return values

    @model_validator(mode="after")
    def _has_a_start(self) -> "ModelSettings":
        if self.checkpoint is None and self.architecture == "from_checkpoint":
            raise ValueError(
                "architecture: from_checkpoint: there is no model.checkpoint; name one, or a file "
                "of config/models"
            )
        return self

    @property
    def stated(self) -> Path | None:
        """The file that says what the architecture is, if one does."""
        return self.architecture if isinstance(self.architecture, Path) else None


class ExportFormat(NamedTuple):
    """What a checkpoint is written as."""

    format: str
    """One of `FORMAT_SIZES`."""
    sizes: dict[str, int]
    """Its sizes by the names in `FORMAT_SIZES`; those left out are 1, and zero_stage 0."""
    dtype: str | None
    """Number format of all tensors; None: each keeps its own."""


def parse_export_format(text: str) -> ExportFormat:
    """Take the name of a form apart: mds-pipeline-tp2-pp4-bf16.

    Raises:
        ValueError: there is no such format, or it has no such sizes.
    """
    formats = "|".join(sorted(FORMAT_SIZES, key=len, reverse=True))
    sizes = "".join(f"(?:-{short}(?P<{short}>[1-9][0-9]*))?" for short in _SHORT)
    found = re.fullmatch(f"(?P<format>{formats}){sizes}(?:-(?P<dtype>{'|'.join(_DTYPES)}))?", text)
    if not found:
        raise ValueError(
            f"give a format ({', '.join(FORMAT_SIZES)}), then its sizes ({', '.join(_SHORT)}) and "
            f"dtype ({', '.join(_DTYPES)}), if need be, as in mds-pipeline-tp2-pp4-bf16"
        )
    given = {size: int(found[short]) for short, size in _SHORT.items() if found[short]}
    if others := given.keys() - set(FORMAT_SIZES[found["format"]]):
        raise ValueError(f"format {found['format']} has no {min(others)}; leave it out")
    if found["format"] == "universal" and found["dtype"]:
        raise ValueError("format universal holds fp32 weights; leave the dtype out")
    if given.get("virtual_pipeline_size", 1) > 1 == given.get("pipeline_parallel_size", 1):
        raise ValueError("vpp says how pipeline ranks share layers; give pp, too")
    _check_zero(found["format"], given)
    return ExportFormat(found["format"], given, found["dtype"])


def _check_zero(format: str, sizes: dict[str, int]) -> None:
    """See that optimizer states can be shared so.

    Raises:
        ValueError: they cannot.
    """
    stage, ranks = sizes.get("zero_stage", 0), sizes.get("data_parallel_size", 1)
    if stage > 3:
        raise ValueError(f"zero{stage}: DeepSpeed has stages 1 to 3; give one of them")
    if format == "mds-pipeline" and stage > 1:
        raise ValueError(
            f"zero{stage}: DeepSpeed itself refuses stages 2 and 3 with pipelines; give zero1, or "
            "mds, which has none"
        )
    if ranks > 1 and not stage:
        raise ValueError(f"dp{ranks} says how ranks share optimizer states; give zero1, too")


def check_export_format(form: ExportFormat, architecture: Architecture) -> None:
    """See that a model can be shared as a form wants it.

    Raises:
        ValueError: ranks do not divide its heads, or stages its layers.
    """
    tensor = form.sizes.get("tensor_parallel_size", 1)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(architecture, name)
        if heads > 1 and heads % tensor:
            raise ValueError(f"tp{tensor}: does not divide {name} {heads}; give a divisor")
    stages = form.sizes.get("pipeline_parallel_size", 1)
    stages *= form.sizes.get("virtual_pipeline_size", 1)
    layers = architecture.num_hidden_layers
    if stages > layers or (form.format == "megatron" and layers % stages):
        raise ValueError(
            f"{stages} stages: the model has {layers} layers; give a number that "
            f"{'divides them' if form.format == 'megatron' else 'is no larger'}"
        )


def _check_form(text: str) -> str:
    parse_export_format(text)
    return text


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


CheckpointForms = Annotated[
    tuple[Annotated[str, AfterValidator(_check_form)], ...], BeforeValidator(_listed)
]
"""What `parse_export_format` takes, several or one."""
