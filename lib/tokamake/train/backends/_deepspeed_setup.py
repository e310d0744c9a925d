"""Set-up of DeepSpeed for a run: its configuration, its process groups.

torch's own optimizers run inside ZeRO, so DeepSpeed compiles nothing at start. DeepSpeed gets the
mesh as an `mpu`, the interface of Megatron: pipeline × tensor ranks are its model-parallel group,
data × context ranks its data-parallel group.
"""

import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokamake.config.resolved_run import Run
from tokamake.parallel.mesh import Mesh
from tokamake.train.backends._deepspeed_internals import disable_shm_extension, partition_each
from tokamake.train.numerics import precision_of
from tokamake.train.pipeline_stages import DTYPES

BUCKET = 50_000_000
"""Elements of gradients that are reduced at once."""
_REPORTS = ("comms_logger", "dump_state", "memory_breakdown", "steps_per_print")
"""Settings of the JSON file by which DeepSpeed writes log lines of the level `info`."""


class Mpu:
    """Process groups of a mesh, as methods with Megatron's names."""

    def __init__(self, mesh: Mesh, world_size: int, *, device: torch.device) -> None:
        model = mesh.pipeline.size * mesh.tensor.size
        ranks = torch.arange(world_size).view(mesh.pipeline.size, -1, mesh.tensor.size)
        groups = DeviceMesh(
            device.type, ranks.movedim(1, 0).reshape(-1, model), mesh_dim_names=("data", "model")
        )
        self._data, self._model = groups.get_group("data"), groups.get_group("model")
        self._tensor = mesh.tensor.rank, mesh.tensor.size
        self._pipeline = mesh.pipeline.rank, mesh.pipeline.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model)

    def get_tensor_model_parallel_rank(self) -> int:
        return self._tensor[0]

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._tensor[1]

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._pipeline[0]

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._pipeline[1]


def initialize(
    run: Run, module: torch.nn.Module, *, optimizer: torch.optim.Optimizer, mpu: Mpu, device: str
) -> Any:
    """Wrap a module and its optimizer in DeepSpeed's engine.

    In stage 3, parameters have no storage yet.
    """
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    reports = any(run.train.deepspeed.get(name) for name in _REPORTS)
    logging.getLogger("DeepSpeed").setLevel(logging.INFO if reports else logging.ERROR)
    disable_shm_extension()
    # Newer versions of torch deprecate names of collectives that DeepSpeed uses.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    config = settings(run, mpu.get_data_parallel_world_size())
    if run.train.zero_stage == 3:
        dtype = DTYPES[precision_of(run)]
        partition_each(module.parameters(), config=config, mpu=mpu, dtype=dtype)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, mpu=mpu, config=config)
    return engine


def settings(run: Run, data_parallel_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a run, with values that it would otherwise guess.

    gradient_accumulation_steps is 1: the engine counts micro batches and tells DeepSpeed when a
    step is complete.
    """
    train = run.train
    zero: dict[str, Any] = {
        "stage": train.zero_stage,
        "overlap_comm": False,
        "reduce_bucket_size": BUCKET,
        # With other values, DeepSpeed all-reduces gradients: twice the bytes of a reduce to owners.
        "contiguous_gradients": train.zero_stage >= 1,
        "use_multi_rank_bucket_allreduce": False,
    }
    for name in ("offload_optimizer", "offload_param"):
        if getattr(train, name) != "none":
            zero[name] = {"device": getattr(train, name)}
    values: dict[str, Any] = {
        "train_batch_size": train.micro_batch_size * data_parallel_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.gradient_clipping if train.zero_stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own optimizer for the CPU would be compiled at start; torch's runs there, too.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    if train.precision == "bf16":
        values["bf16"] = {
            "enabled": True,
            "check_grad_overflow": True,
            "immediate_grad_update": True,
        }
    if train.precision == "fp16":
        # The engine sets the scale at each step; 0 would mean DeepSpeed's dynamic scaling.
        values["fp16"] = {"enabled": True, "loss_scale": 1.0}
    return _merged(values, train.deepspeed)


def _merged(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Add given settings to `values`, section by section; given settings win."""
    sections = {
        name: _merged(values[name], value)
        for name, value in given.items()
        if isinstance(values.get(name), dict)
    }
    return values | given | sections
