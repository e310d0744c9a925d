"""Distributed checkpoints of megatron.core on CPU ranks; a program of its own.

    python dist_cores.py save FOLDER RANK TENSOR PIPELINE DATA EXPERT NAME...
    python dist_cores.py load FOLDER RANK TENSOR PIPELINE DATA EXPERT FROM/KIND...
    python dist_cores.py classic FOLDER RANK 1 1 DATA 1 FROM/FILE...

TENSOR, PIPELINE, DATA and EXPERT are numbers of ranks.

`save` writes a checkpoint FOLDER/CASE-KIND for each NAME, with states of one step of Adam whose
gradients were the weights: the first moments are half of these. Afterwards, fp32 weights are not
rounded. `load` loads each checkpoint FROM as Megatron-LM does, and saves what it has loaded in
FOLDER/NAME/KIND, where NAME is the last part of FROM. `classic` loads the distributed optimizer of
a rank of a classic checkpoint, FILE, for whatever parameters it has, and saves what it holds.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import cores
from tests.support.core_arguments import arguments

LR, DECAY = 1e-3, 0.1
WITHOUT = ("none", "plain", "layers")
"""Kinds of checkpoints without a distributed optimizer: without states, with them, and with a
tensor for each layer. All other kinds are of a distributed one."""


class Sizes(NamedTuple):
    """Numbers of ranks."""

    tensor: int
    pipeline: int
    data: int
    expert: int = 1
    """Of the data-parallel ranks."""

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data


def without_gpu() -> None:
    """Replace what megatron.core asks of a GPU."""
    import torch

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return function(*arguments, **options)

        return call

    patched: Any = torch
    for name in ("tensor", "zeros", "empty", "ones"):
        setattr(patched, name, on_cpu(getattr(torch, name)))
    patched.cuda.is_available = lambda: False
    patched.cuda.synchronize = lambda *_: None
    patched.Tensor.cuda = lambda self, *_, **__: self
    kind = torch.Tensor.type
    # Megatron sorts parameters by names such as torch.cuda.BFloat16Tensor.
    patched.Tensor.type = lambda self, *arguments: (
        kind(self, *arguments) if arguments else kind(self).replace("torch.", "torch.cuda.")
    )


def with_step_counts() -> None:
    """Let the distributed optimizer load states into torch's Adam.

    megatron.core 0.16 asks for a step count of each parameter, which only the load without Apex and
    Transformer Engine has, and which it does not save.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    patched: Any = DistributedOptimizer
    fill = patched._set_main_param_and_optimizer_states

    def fill_with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        own = self._get_main_param_and_optimizer_states(parameter)
        fill(self, parameter, {**tensors, "step": own["step"]})

    patched._set_main_param_and_optimizer_states = fill_with_step


def with_forked_queue() -> None:
    """Let the process of the queue of results be a fork: a new one would import torch."""
    import multiprocessing

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    patched: Any = filesystem_async
    patched._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def make(name: str, kind: str, rank: int, sizes: Sizes, dtype: Any) -> tuple[Any, Any, Any]:
    """Return arguments, model and optimizer of a rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from torch import bfloat16, float16

    args = arguments(name)
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = sizes[:2]
    args.expert_model_parallel_size = sizes.expert
    args.params_dtype = dtype
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = cores.model_of(
        args,
        parallel_state.get_tensor_model_parallel_rank(),
        pre_process=stage == 0,
        post_process=stage == sizes.pipeline - 1,
    ).to(dtype)
    if kind == "none":
        return args, model, None
    distributed = kind not in WITHOUT
    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
        ),
        model,
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=DECAY,
        adam_beta1=0.5,
        adam_beta2=0.75,
        clip_grad=0.0,
        bf16=dtype == bfloat16,
        fp16=dtype == float16,
        initial_loss_scale=1024.0,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    for group in optimizer.param_groups:  # as Megatron's scheduler does before each step
        group["weight_decay"] = DECAY * group["wd_mult"]
    return args, model, optimizer


def sharded_state(
    args: Any, model: Any, optimizer: Any, metadata: dict[str, Any], **options: Any
) -> Any:
    """State of a rank, as Megatron-LM's generate_state_dict makes it."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = metadata | {"dp_cp_group": group}
    tensors = model.sharded_state_dict(metadata=metadata)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": tensors}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata, **options)
    return state


def metadata_of(kind: str) -> dict[str, Any]:
    """content_metadata of a checkpoint."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if kind not in WITHOUT:
        metadata["distrib_optim_sharding_type"] = kind
    if kind == "layers":
        metadata["non_homogeneous_layers"] = True
    if kind == "fully_reshardable":
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def save(folder: Path, args: Any, model: Any, optimizer: Any, kind: str) -> None:
    """Save a checkpoint."""
    from megatron.core import dist_checkpointing

    target = folder / "iter_0000007"
    target.mkdir(parents=True, exist_ok=True)
    metadata = metadata_of(kind)
    state = sharded_state(args, model, optimizer, metadata)
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def write(folder: Path, name: str, kind: str, rank: int, sizes: Sizes) -> None:
    """Save a checkpoint after a step, and that of the classic format's distributed optimizer."""
    import torch

    case, _, dtype = name.partition(":")
    of_type = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    args, model, optimizer = make(case, kind, rank, sizes, of_type)
    target = folder / f"{case}-{kind}{dtype and '-'}{dtype}"
    if optimizer is not None:
        scale = optimizer.get_loss_scale().item()
        for parameter in model.parameters():
            parameter.main_grad.copy_(parameter.detach().float() * scale)
        optimizer.step()
    save(target, args, model, optimizer, kind)
    if kind not in WITHOUT or sizes.expert > 1:
        tensor, stage, expert = rank_of(sizes)
        place = f"_{stage:03d}" * (sizes.pipeline > 1) + f"_{expert:03d}" * (sizes.expert > 1)
        file = target / f"classic/iter_0000007/mp_rank_{tensor:02d}{place}/model_optim_rng.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        if kind not in WITHOUT:
            optimizer.save_parameter_state(str(file.with_name("distrib_optim.pt")))
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
        weights = model.state_dict_for_save_checkpoint()
        torch.save({**state, "model": weights, "optimizer": optimizer.state_dict()}, file)


def rank_of(sizes: Sizes) -> tuple[int, int, int]:
    """Tensor-parallel, pipeline and expert-parallel rank."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )


def load(folder: Path, source: Path, kind: str, rank: int, sizes: Sizes) -> None:
    """Load a checkpoint of the case that its folder is named after, and save what was loaded."""
    import torch
    from megatron.core import dist_checkpointing

    (path,) = source.glob("iter_*")
    common = dist_checkpointing.load_common_state_dict(str(path))
    dtype = torch.bfloat16 if source.name.endswith("bf16") else torch.float32
    name = source.name.removesuffix("-bf16")
    args, model, optimizer = make(name, kind, rank, sizes, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if optimizer is not None:
        # Without Transformer Engine, the distributed optimizer has a step count only after a step.
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        optimizer.step()
    state = sharded_state(
        args,
        model,
        optimizer,
        dist_checkpointing.load_content_metadata(preloaded_state_dict=common),
        **({} if optimizer is None else {"is_loading": True}),
    )
    loaded = dist_checkpointing.load(state, str(path))
    model.load_state_dict(loaded["model"], strict=True)
    if optimizer is not None:
        if kind == "plain":
            # torch's Adam counts steps of each parameter, that of Transformer Engine of each group.
            # The optimizer for fp32 weights wraps no other one.
            of_all = loaded["optimizer"]
            for saved in [*of_all.values()] if 0 in of_all else [of_all]:
                inner = saved if dtype == torch.float32 else saved["optimizer"]
                count = float(inner["param_groups"][0]["step"])
                inner["state"]["common_step"] = torch.tensor(count)
        optimizer.load_state_dict(loaded["optimizer"])
    save(folder, args, model, optimizer, kind)


def classic(folder: Path, file: Path) -> None:
    """Load the states of a rank's file, and save them as they are by parameter and in buffers."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    state = torch.load(file, weights_only=False)
    models, names = [], {}
    for key in sorted(key for key in state if key.startswith("model")):
        model = torch.nn.Module()
        for name, tensor in leaves(state[key], key):
            parameter = torch.nn.Parameter(tensor.detach().clone())
            model.register_parameter(name.replace(".", "/"), parameter)
            names[parameter] = name
            dtype = tensor.dtype
        models.append(
            DistributedDataParallel(
                TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
                DistributedDataParallelConfig(
                    use_distributed_optimizer=True, grad_reduce_in_fp32=dtype != torch.float16
                ),
                model,
            )
        )
    config = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=DECAY,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        initial_loss_scale=1.0,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, models)
    optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        optimizer.load_parameter_state(str(file.with_name("distrib_optim.pt")))
    folder.mkdir(parents=True, exist_ok=True)
    optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    (inner,) = optimizer.chained_optimizers
    held = {
        name: {
            "weight": parameter.detach(),
            **inner._get_main_param_and_optimizer_states(parameter),
        }
        for parameter, name in names.items()
        if parameter in inner.model_param_gbuf_map
    }
    rank = torch.distributed.get_rank()
    torch.save({"held": held, "optimizer": optimizer.state_dict()}, folder / f"{rank}.pt")


def leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Tensors in nested dictionaries, by dotted names."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", value


def main(mode: str, folder: Path, rank: int, sizes: Sizes, rest: list[str]) -> None:
    """Save or load."""
    os.environ.update(TORCHDYNAMO_DISABLE="1", CUDA_VISIBLE_DEVICES="")
    meeting = folder.with_name(f"{folder.name}.meeting")
    cores.start(meeting, rank, sizes.world, *sizes[:2], sizes.expert)
    without_gpu()
    with_step_counts()
    with_forked_queue()
    for item in rest:
        start, _, kind = item.rpartition("/")
        if mode == "classic":
            classic(folder, Path(item))
        elif mode == "load":
            source = Path(start)
            load(folder / source.name / kind, source, kind, rank, sizes)
        else:
            write(folder, start, kind, rank, sizes)


if __name__ == "__main__":
    main(
        sys.argv[1],
        Path(sys.argv[2]),
        int(sys.argv[3]),
        Sizes(*map(int, sys.argv[4:8])),
        sys.argv[8:],
    )
