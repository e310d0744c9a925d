"""Lines that the trainer prints as it starts: job, model, start, layout, settings, memory."""

import math
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from tokamake.checkpoint import model_tensors
from tokamake.config.fields import dotted
from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings
from tokamake.runtime.console import counted, shortened
from tokamake.runtime.device import device_memory
from tokamake.runtime.ranks import Ranks
from tokamake.train.memory import estimate
from tokamake.train.numerics import precision_of
from tokamake.units import in_bytes


def startup_log(
    run: Run, ranks: Ranks, *, device: torch.device, resumed: Path | None = None
) -> str:
    """Describe a run that starts."""
    # The other lines already show these two.
    defaults = TrainSettings(precision=run.train.precision, finetune=run.train.finetune)
    return "\n".join(
        f"{title:9} {text}"
        for title, text in (
            ("job", _job()),
            ("model", _model(run)),
            ("start", f"{resumed}, where this run continues" if resumed else _start(run)),
            ("layout", _layout(run, ranks, device)),
            ("changed", shortened([*changed_settings(run.train, defaults)]) or "no setting"),
            *(("setting", line) for line in _all_settings(run)),
            *_memory(run, ranks, device=device),
        )
    )


def _all_settings(run: Run) -> list[str]:
    settings = dotted(run.train.model_dump(mode="json")) if run.train.log_settings else {}
    return [f"{name}: {value}" for name, value in settings.items()]


def num_parameters(run: Run) -> int:
    """Number of parameters of the whole model."""
    return sum(map(math.prod, model_tensors.shapes(run.architecture).values()))


def _job() -> str:
    """When and where this job begins: the log of a run has the lines of all its jobs."""
    number = next(filter(None, map(os.environ.get, ("SLURM_JOB_ID", "PBS_JOBID"))), "")
    began = datetime.now().astimezone().isoformat(" ", "seconds")
    return f"{began} on {socket.gethostname()}" + f", {number}" * bool(number)


def _model(run: Run) -> str:
    train = run.train
    tokens = train.global_batch_size * train.sequence_length
    return (
        f"{run.run}: {run.architecture.family}, {num_parameters(run):,} parameters; "
        f"{counted(train.train_steps, 'step')} of {tokens:,} tokens"
    )


def _start(run: Run) -> str:
    if run.checkpoint is None:
        return run.start
    if run.train.finetune is False:
        loaded = "weights, optimizer states, loss scale"
        if not run.train.load_optimizer:
            loaded = "weights with a new optimizer"
        return (
            f"{run.checkpoint}, continued at step {run.step:,}: {loaded}, "
            f"{run.consumed_samples:,} samples"
        )
    prefix = "finetuned: " if run.train.finetune else ""
    return f"{run.checkpoint}, {prefix}weights alone, at step 0"


def _layout(run: Run, ranks: Ranks, device: torch.device) -> str:
    train, parallel = run.train, run.train.parallel
    sizes = {
        "data": parallel.data_parallel_size(ranks.world_size),
        "context": parallel.context_parallel_size,
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
    }
    experts = parallel.expert_parallel_size
    product = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return (
        f"{counted(ranks.world_size, 'rank')}{f' = {product}' * bool(product)} on {device.type}, "
        f"{f'experts divided by {experts}, ' * (experts > 1)}"
        f"{precision_of(run)}, {train.backend}, ZeRO stage {train.zero_stage}"
    )


def changed_settings(value: BaseModel, default: BaseModel, *, prefix: str = "") -> Iterator[str]:
    """Settings that differ from their defaults, as `name value`.

    The settings of a plug-in, such as an optimizer, are compared with the defaults of that plug-in.
    """
    if (kind := getattr(value, "name", None)) != getattr(default, "name", None):
        yield f"{prefix}name {kind}"
        default = type(value).model_validate({"name": kind})
    for name in type(default).model_fields:
        setting, default_setting = getattr(value, name), getattr(default, name)
        if isinstance(setting, BaseModel) and default_setting is None:
            default_setting = type(setting)()  # the section of an objective
        if isinstance(setting, BaseModel) and isinstance(default_setting, BaseModel):
            yield from changed_settings(setting, default_setting, prefix=f"{prefix}{name}.")
        elif setting != default_setting:
            yield f"{prefix}{name} {_format(setting)}"


def _format(value: Any) -> str:
    if value is None:
        return "empty"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _memory(run: Run, ranks: Ranks, *, device: torch.device) -> Iterator[tuple[str, str]]:
    needed, available = estimate(run, ranks.world_size, device.type), device_memory(device, ranks)
    sizes = zip(needed._fields[:4], needed[:4], strict=True)
    kinds = ", ".join(f"{name} {in_bytes(round(size))}" for name, size in sizes)
    total = in_bytes(round(needed.total))
    room = in_bytes(round(available))
    yield "memory", f"at most about {total} a rank at one time ({kinds}); the device has {room}"
    if needed.total > available:
        yield (
            "warning",
            "that is more than the device has: lower train.micro_batch_size, raise "
            "train.zero_stage, share the model over more ranks (train.parallel), or set "
            "train.recompute_granularity",
        )
