"""Section `model` of the config, and the names of export formats such as mds-tp2-bf16."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationInfo, model_validator

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import with_settings
from tokamake.config.fields import Settings, local_path
from tokamake.errors import divisor

FORMATS = "checkpoint/**/format"
"""Kind of the plug-ins that are checkpoint formats."""
_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_size",
    "ep": "expert_parallel_size",
    "dp": "data_parallel_size",
    "zero": "zero_stage",
}
_DTYPES = ("fp32", "bf16", "fp16")


def format_names() -> list[str]:
    """Names of all checkpoint formats, as the config and the command line spell them."""
    return [name.replace("_", "-") for name in plugins.names(FORMATS)]


def _constant(format: str, name: str, *, default: Any = None) -> Any:
    return plugins.constant(FORMATS, format.replace("-", "_"), name, default=default)


def format_sizes(format: str) -> Mapping[str, int | None]:
    """Options of `convert` that split a checkpoint of a format, each with its largest value."""
    return dict(_constant(format, "SIZES", default=()))


def format_summaries() -> str:
    """All checkpoint formats with their summaries, for a help text."""
    return ", ".join(f"{name} ({_constant(name, 'SUMMARY')})" for name in format_names())


def formats_with(size: str) -> list[str]:
    """Names of the formats that have a size, such as zero_stage."""
    return [format for format in format_names() if size in format_sizes(format)]


def formats_with_tokenizer() -> list[str]:
    """Names of the formats that have a tokenizer beside the weights."""
    return [name for name in format_names() if _constant(name, "TOKENIZER_CONFIG", default="")]


class ParentRun(Settings):
    """Another run of the same table of runs, as a start."""

    run: str
    """Name of the run whose last checkpoint this run starts from."""


def _as_architecture(value: Any) -> Any:
    """The name of a file; its settings cannot stand in its place."""
    if value is None or isinstance(value, str | Path):
        return value
    raise ValueError(
        "give the YAML file of an architecture, such as config/models/tiny-gpt.yaml, or "
        "from_checkpoint"
    )


def _as_checkpoint(value: Any, info: ValidationInfo) -> Any:
    """A mapping is the name of a run, anything else a folder."""
    is_run = isinstance(value, dict) and value.keys() == {"run"} and isinstance(value["run"], str)
    if is_run or value is None or isinstance(value, str | Path | ParentRun):
        return ParentRun(**value) if is_run else local_path(value, info, tokenizer_only=False)
    raise ValueError(
        "give the folder of a checkpoint, or the name of a run of the same table: {run: NAME}"
    )


class ModelSettings(Settings):
    """Where training starts from: a checkpoint, or random weights."""

    architecture: Annotated[
        Literal["from_checkpoint"] | Path | None, BeforeValidator(_as_architecture)
    ] = Path("config/models/tiny-llama.yaml")
    """Shape of the model: a file, or from_checkpoint, the default where a checkpoint is named.
    Further keys of the section replace its settings, as `model.num_layers=64` on the command line;
    or settings after the file's name: FILE:num_hidden_layers=4:hidden_size=256. A new hidden_size
    has the intermediate_size of the family's rule, unless that is given, too. A checkpoint must
    match the file. After a run of the table, rope_theta, rope_scaling and max_position_embeddings
    may differ. An empty vocab_size is the checkpoint's or the tokenizer's."""
    checkpoint: Annotated[Path | ParentRun | None, BeforeValidator(_as_checkpoint)] = None
    """Checkpoint to start from: a folder, in any format that `tokamake inspect` reads, or its
    parent whose file `latest` names it; an address of the Hugging Face Hub, hf://ORG/NAME@REVISION;
    or the last checkpoint of another run of the table of runs: {run: NAME}. See train.finetune.
    The family is that of the architecture, or one that can start it: an encoder for towers, a dense
    model for experts. Empty: random weights."""

    # Settings of the architecture are allowed here, too: they are joined to its file's name.
    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    @model_validator(mode="before")
    @classmethod
    def _default_to_the_checkpoint(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("checkpoint") is not None:
            values = {**values, "architecture": values.get("architecture") or "from_checkpoint"}
        own = {key: value for key, value in values.items() if key not in cls.model_fields}
        if not own:
            return values
        stated = {key: value for key, value in values.items() if key in cls.model_fields}
        file = stated.get("architecture", cls.model_fields["architecture"].default)
        return {**stated, "architecture": with_settings(file, own, others=[*cls.model_fields])}

    @model_validator(mode="after")
    def _check_checkpoint_is_named(self) -> "ModelSettings":
        if self.checkpoint is None and self.stated is None:
            raise ValueError(
                f"architecture: {self.architecture or 'null'}: there is no checkpoint; name a "
                "file of config/models, or set model.checkpoint"
            )
        return self

    @property
    def parent(self) -> str | None:
        """Name of the run of the same table whose last checkpoint is the start."""
        return self.checkpoint.run if isinstance(self.checkpoint, ParentRun) else None

    @property
    def folder(self) -> Path | None:
        """Folder of the checkpoint to start from, if the config names one."""
        return self.checkpoint if isinstance(self.checkpoint, Path) else None

    @property
    def stated(self) -> Path | None:
        """File of the architecture; None if the checkpoint alone defines it."""
        return self.architecture if isinstance(self.architecture, Path) else None


class ExportFormat(NamedTuple):
    """How to write a checkpoint: format, layout and dtype."""

    format: str
    """One of `format_names()`."""
    sizes: dict[str, int]
    """By the names of `format_sizes`; a missing size is 1, a missing zero_stage 0."""
    dtype: str | None
    """Dtype of all tensors; None: each keeps its own."""


def parse_export_format(text: str) -> ExportFormat:
    """Parse the name of an export format, such as mds-pipeline-tp2-pp4-bf16."""
    # Longest first: "mds" is also the beginning of "mds-pipeline".
    formats = "|".join(sorted(format_names(), key=len, reverse=True))
    pattern = "".join(f"(?:-{short}(?P<{short}>[1-9][0-9]*))?" for short in _SHORT)
    match = re.fullmatch(
        f"(?P<format>{formats}){pattern}(?:-(?P<dtype>{'|'.join(_DTYPES)}))?", text
    )
    if not match:
        raise ValueError(
            f"give a format ({', '.join(format_names())}), then its sizes ({', '.join(_SHORT)}) "
            f"and dtype ({', '.join(_DTYPES)}), if need be, as in mds-pipeline-tp2-pp4-bf16"
        )
    format, dtype = match["format"], match["dtype"]
    sizes = {name: int(match[short]) for short, name in _SHORT.items() if match[short]}
    if unknown := sizes.keys() - format_sizes(format).keys():
        raise ValueError(f"format {format} has no {min(unknown)}; leave it out")
    if dtype and (only_dtype := _constant(format, "DTYPE", default="")):
        raise ValueError(f"format {format} holds {only_dtype} weights; leave the dtype out")
    if sizes.get("virtual_pipeline_size", 1) > 1 == sizes.get("pipeline_parallel_size", 1):
        raise ValueError("vpp says how pipeline ranks share layers; give pp, too")
    if (num_ranks := sizes.get("data_parallel_size", 1)) > 1 and "zero_stage" not in sizes:
        raise ValueError(f"dp{num_ranks} says how ranks share optimizer states; give zero1, too")
    _check_limits(format, sizes)
    return ExportFormat(format, sizes, dtype)


def _check_limits(format: str, sizes: Mapping[str, int]) -> None:
    """Check that no size exceeds the largest value of its format."""
    for name, size in sizes.items():
        if (limit := format_sizes(format)[name]) is None or size <= limit:
            continue
        others = [each for each in formats_with(name) if (format_sizes(each)[name] or size) >= size]
        choice = f", or choose {' or '.join(others)}" if others else ""
        raise ValueError(
            f"{name} {size}: format {format} allows at most {limit}; give {limit} or less{choice}"
        )


def check_export_format(form: ExportFormat, architecture: Architecture) -> None:
    """Check that the layout of an export format fits a model."""
    tensor = form.sizes.get("tensor_parallel_size", 1)
    for name in ("num_attention_heads", "num_key_value_heads"):
        num_heads = getattr(architecture, name)
        # A single head of keys and values (multi-query) is replicated, not divided.
        if num_heads > 1 and num_heads % tensor:
            raise ValueError(
                f"tp{tensor}: does not divide {name} {num_heads}; give {divisor(num_heads)}"
            )
    experts = form.sizes.get("expert_parallel_size", 1)
    if experts > 1 and not architecture.has_routers:
        raise ValueError(f"ep{experts}: family {architecture.family} has no experts; leave it out")
    if experts > 1 and (number := architecture.setting("num_experts")) % experts:
        raise ValueError(f"ep{experts}: does not divide {number} experts; give {divisor(number)}")
    num_stages = form.sizes.get("pipeline_parallel_size", 1)
    num_stages *= form.sizes.get("virtual_pipeline_size", 1)
    stacks = architecture.several_stacks
    if stacks and (num_stages > 1 or form.format == "mds-pipeline"):
        raise ValueError(
            f"{form.format}: stages of a model with {stacks} are not supported; choose another "
            "format, without pp"
        )
    num_layers = architecture.num_hidden_layers
    has_equal_stages = _constant(form.format, "EQUAL_STAGES", default=False)
    if num_stages > num_layers or (has_equal_stages and num_layers % num_stages):
        raise ValueError(
            f"{num_stages} stages: the model has {num_layers} layers; give a number that "
            f"{'divides them' if has_equal_stages else 'is no larger'}"
        )


def _check_form(text: str) -> str:
    parse_export_format(text)
    return text


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


CheckpointForms = Annotated[
    tuple[Annotated[str, AfterValidator(_check_form)], ...], BeforeValidator(_as_tuple)
]
