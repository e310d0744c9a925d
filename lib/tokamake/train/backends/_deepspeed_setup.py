"""DeepSpeed set up for a run: what it can and cannot do, its configuration, its process groups.

Stages and mesh come from the engine. torch's own optimizers run inside ZeRO, so nothing is compiled
at start. DeepSpeed knows of our layouts through Megatron's `mpu`: pipeline × tensor ranks are its
model-parallel group, data × context ranks its data-parallel one.
"""

import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.parallel.mesh import Mesh

BUCKET = 50_000_000
"""Gradients that are reduced at once, in elements."""


_NATIVE = ("muon", "adamw_8bit")
"""Optimizers whose parameters or states have forms that flat buffers do not know."""


def check(run: Run, device: torch.device | None = None) -> None:
    """See that DeepSpeed can train so.

    Args:
        run: the resolved run.
        device: of this rank; None where it is not known yet.

    Raises:
        UserError: it cannot, or would be wrong.
    """
    train, parallel, name = run.train, run.train.parallel, run.train.optimizer.name
    stage, precision = train.zero_stage, train.precision
    pipelined, low = parallel.pipeline_parallel_size > 1, precision not in ("fp32", None)
    if pipelined and stage >= 2:
        _refuse(
            f"zero_stage: {stage}: reduces gradients while passes go on, which it cannot do for "
            "the many micro batches of a pipeline; set it to 1 or pipeline_parallel_size to 1"
        )
    if precision == "fp16" and device is not None and device.type == "cpu":
        _refuse("precision: fp16: has no fp16 on the CPU; set it to bf16")
    if low and stage == 0:
        _refuse(f"zero_stage: 0: keeps no fp32 weights beside {precision}; set it to 1")
    if stage == 3 and train.recompute_granularity == "selective":
        _refuse(
            "recompute_granularity: selective: does not go with zero_stage 3, whose gathering of "
            "weights it would keep; set it to full or zero_stage to 2"
        )
    if parallel.data_parallel_replicate_size > 1:
        _refuse(
            f"parallel.data_parallel_replicate_size: {parallel.data_parallel_replicate_size}: "
            "it shards over all data-parallel ranks; set it to 1"
        )
    if name in _NATIVE:
        _refuse(f"optimizer.name: {name}: cannot use it; take another optimizer")
    if stage and not plugins.constant("optim", name, "ELEMENTWISE"):
        _refuse(
            f"optimizer.name: {name}: needs whole parameters, of which zero_stage: {stage} cuts "
            "flat pieces; set it to 0"
        )


def _refuse(why: str) -> None:
    raise UserError(f"train.backend: deepspeed: with train.{why}, or train.backend to native")


class Mpu:
    """The run's process groups, under the names by which Megatron calls them.

    Args:
        mesh: this rank among its peers.
        world_size: ranks of the run.
        device: of this rank.
    """

    def __init__(self, mesh: Mesh, world_size: int, device: torch.device) -> None:
        model = mesh.pipeline.size * mesh.tensor.size
        ranks = torch.arange(world_size).view(mesh.pipeline.size, -1, mesh.tensor.size)
        both = DeviceMesh(
            device.type,
            ranks.movedim(1, 0).reshape(-1, model),
            mesh_dim_names=("data", "model"),
        )
        self._data, self._model = both.get_group("data"), both.get_group("model")
        self._tensor = mesh.tensor.rank, mesh.tensor.size
        self._pipeline = mesh.pipeline.rank, mesh.pipeline.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks with the same parameters."""
        return self._data

    def get_data_parallel_rank(self) -> int:
        """Place among them."""
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self._data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that together have all parameters."""
        return self._model

    def get_model_parallel_rank(self) -> int:
        """Place among them."""
        return dist.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self._model)

    def get_tensor_model_parallel_rank(self) -> int:
        """Place among ranks that share each layer."""
        return self._tensor[0]

    def get_tensor_model_parallel_world_size(self) -> int:
        """How many they are."""
        return self._tensor[1]

    def get_pipeline_model_parallel_rank(self) -> int:
        """Place among ranks that share the layers."""
        return self._pipeline[0]

    def get_pipeline_model_parallel_world_size(self) -> int:
        """How many they are."""
        return self._pipeline[1]


def initialize(
    run: Run, module: torch.nn.Module, optimizer: torch.optim.Optimizer, mpu: Mpu, device: str
) -> Any:
    """Put DeepSpeed's engine around a module and the optimizer of its parameters."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Of no use in training, yet DeepSpeed would compile it at start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed calls collectives by names that newer versions of torch complain about.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        mpu=mpu,
        config=settings(run, mpu.get_data_parallel_world_size()),
    )
    return engine


def settings(run: Run, data_parallel_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a run; what it would guess is spelled out.

    Micro batches are counted by the engine, which tells DeepSpeed when a step is complete.
    """
    train = run.train
    zero: dict[str, Any] = {
        "stage": train.zero_stage,
        "overlap_comm": False,
        "contiguous_gradients": train.zero_stage >= 2,
        "reduce_bucket_size": BUCKET,
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
        # torch's optimizers run on the CPU, too; DeepSpeed's own would be compiled at start.
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
        # The scale is ours and set at each step; 0 would be DeepSpeed's own.
        values["fp16"] = {"enabled": True, "loss_scale": 1.0}
    return values
