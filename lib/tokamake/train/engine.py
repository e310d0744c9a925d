"""DeepSpeed around a model: the only module that imports deepspeed.

Weights come from a Megatron-DeepSpeed checkpoint, token batches from the loop; loss, gradient norm
and checkpoints go back. torch's own AdamW runs inside ZeRO, so nothing is compiled at start.
Shape suffixes: B samples of a micro batch, L tokens.
"""

import math
import os
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tokamake import files, plugins
from tokamake.checkpoint import megatron_deepspeed
from tokamake.config import PACKING_SETTINGS, Architecture, Run
from tokamake.data.samples.packed import packed
from tokamake.errors import UserError
from tokamake.optim._groups import parameter_groups
from tokamake.runtime import Ranks, same_fate

Batch = npt.NDArray[np.int64]


class Named(torch.nn.Module):
    """A model whose state has Megatron-DeepSpeed's names, for DeepSpeed to save and load.

    Under ZeRO stage 3 a rank holds slices only, which the optimizer's files keep; its state is
    empty then.
    """

    def __init__(self, model: torch.nn.Module, architecture: Architecture, *, sliced: bool) -> None:
        super().__init__()
        self.model = model
        self._architecture = architecture
        self._sliced = sliced
        self._rename = plugins.load("models", architecture.family).hugging_face_name

    def forward(self, tokens_BL: torch.Tensor, **apart: torch.Tensor) -> torch.Tensor:
        """Mean loss of a micro batch; `apart` is what keeps the documents of a row apart."""
        loss: torch.Tensor = self.model.loss(tokens_BL, **apart)  # type: ignore[operator]
        return loss

    def to_megatron(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Nest the model's parameters as Megatron does."""
        named = {self._rename(name): value for name, value in parameters.items()}
        return megatron_deepspeed.to_megatron(self._architecture, named)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's tensors, nested as Megatron does."""
        return {} if self._sliced else self.to_megatron(self.model.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Take what `state_dict` gave; every tensor must be there."""
        if self._sliced:
            return None
        tensors = megatron_deepspeed.from_megatron(self._architecture, state_dict)
        return self.take(tensors)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Copy tensors with Hugging Face's names into the model."""
        own = {name: tensors[self._rename(name)] for name, _ in self.model.named_parameters()}
        return self.model.load_state_dict(own)


class Engine:
    """One rank's share of the training run.

    Args:
        run: the resolved run.
        ranks: this process among its peers.
        device: where the model lives.

    Raises:
        UserError: the settings do not go together.
    """

    def __init__(self, run: Run, ranks: Ranks, device: torch.device) -> None:
        self._run, self._ranks, self._device = run, ranks, device
        random.seed(run.seed)
        np.random.seed(run.seed)
        torch.manual_seed(run.seed)
        self._engine = _initialize(run, ranks, device)
        self._optimizer = self._engine.optimizer

    def train_step(
        self, batches: Sequence[Batch], *, learning_rate: float, stop: bool
    ) -> tuple[float, float, bool]:
        """Do one optimizer step.

        Args:
            batches: this rank's micro batches of the step, (B, L + 1) tokens each.
            learning_rate: of this step.
            stop: whether this rank was asked to stop.

        Returns:
            Loss before the step over the global batch, norm of its gradient before clipping, and
            whether any rank was asked to stop. A loss that is not finite comes back without a step.
        """
        self._engine.train()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        num_batches = len(batches)
        size = num_batches * self._run.train.micro_batch_size * self._ranks.world_size
        if size != self._engine.train_batch_size():
            self._engine.set_train_batch_size(size)
        total = torch.zeros(2, device=self._device)
        for number, batch in enumerate(batches, 1):
            # Steps may differ in size, which DeepSpeed's own count does not expect.
            self._engine.set_gradient_accumulation_boundary(number == num_batches)
            loss = self._loss(batch)
            self._engine.backward(loss)
            total[0] += loss.detach().float() / num_batches
            if number < num_batches:
                self._engine.step()
        total[1] = stop
        dist.all_reduce(total)
        mean, stopped = total[0].item() / self._ranks.world_size, total[1].item() > 0
        if not math.isfinite(mean):
            return mean, math.nan, stopped
        return mean, self._step(), stopped

    def _loss(self, batch: Batch) -> torch.Tensor:
        apart = keep_apart(batch, self._run)
        tensors = {name: to_device(array, self._device) for name, array in apart.items()}
        loss: torch.Tensor = self._engine(to_device(batch, self._device), **tensors)
        return loss

    def _step(self) -> float:
        norm = math.nan
        if self._engine.zero_optimization_stage() == 0 or self._run.train.gradient_clipping == 0:
            norm = self._unpartitioned_norm()
        self._engine.step()
        found = self._engine.get_global_grad_norm()
        return norm if found is None else float(found)

    def _unpartitioned_norm(self) -> float:
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else math.nan

    def mean_loss(self, batches: Iterable[Batch]) -> float:
        """Loss over the micro batches of all ranks, without training on them."""
        self._engine.eval()
        total = torch.zeros(2, device=self._device)
        with torch.no_grad():
            for batch in batches:
                total[0] += self._loss(batch).float()
                total[1] += 1
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def save(self, folder: Path, *, tag: str, state: dict[str, Any]) -> None:
        """Write `folder`/`tag`, a Megatron-DeepSpeed checkpoint, and bring it to disk.

        Args:
            folder: empty folder; all ranks call with the same one.
            tag: name of the checkpoint.
            state: what else to store: step, samples, tokens.
        """
        state = {**state, "rng_state": _gather(_random_state())}
        self._engine.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)
        if self._engine.zero_optimization_stage() == 3:
            self._save_whole(folder / tag, state)
        dist.barrier()
        own = f"*_rank_{self._ranks.rank}_*" if self._ranks.rank else "*"
        for path in sorted((folder / tag).glob(own)):
            files.sync(path)
        dist.barrier()

    def _save_whole(self, folder: Path, state: dict[str, Any]) -> None:
        """Under stage 3, gather the weights into the file that the other stages write."""
        import deepspeed

        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._engine.module.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if self._ranks.rank == 0:
                    tensors[name] = parameter.detach().cpu().clone()
        if self._ranks.rank == 0:
            module = self._engine.module.to_megatron(tensors)
            torch.save({"module": module, **state}, folder / "mp_rank_00_model_states.pt")

    def load(self, folder: Path, *, tag: str) -> None:
        """Continue from a checkpoint of `save`: weights, optimizer, random generators."""
        path, state = self._engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise UserError(
                f"{folder / tag}: not loaded; name another checkpoint in {folder}/latest"
            )
        _set_random_state(state["rng_state"][self._ranks.rank])


def keep_apart(batch: Batch, run: Run) -> dict[str, npt.NDArray[Any]]:
    """What the run's settings say about documents that share a row, as `Model.loss` takes it."""
    options = {name: getattr(run.train, name) for name in PACKING_SETTINGS}
    if not any(options.values()):
        return {}
    assert run.eod is not None, "resolve has looked it up"
    made = packed(batch, eod=run.eod, **options)
    found: dict[str, npt.NDArray[Any]] = {"loss_mask": made.loss_mask}
    if run.train.reset_position_ids:
        found["position_ids"] = made.position_ids
    if run.train.reset_attention_mask:
        found["document_ids"] = made.document_ids
    return found


def to_device(batch: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Bring a batch to the device; an accelerator reads it from pinned memory, with no one waiting.

    torch keeps pinned memory and gives it out again once the device has read it.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(batch))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _initialize(run: Run, ranks: Ranks, device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Of no use in training, yet DeepSpeed would compile it at start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed calls collectives by names that newer versions of torch complain about.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    with same_fate():
        model = _model(run)
    groups = parameter_groups(model.named_parameters(), run.train.optimizer.weight_decay)
    optimizer = plugins.load("optim", run.train.optimizer.name).build(groups, run.train.optimizer)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings(run, ranks.world_size)
    )
    return engine


def _model(run: Run) -> Named:
    """The model with the weights that the run starts from, in fp32 on the CPU."""
    architecture, tensors, _ = megatron_deepspeed.read(run.checkpoint)
    if architecture != run.architecture:
        raise UserError(
            f"{run.checkpoint}: not of the architecture that the run was resolved for; "
            "run `tokamake resolve` again"
        )
    with torch.device("meta"):
        model = plugins.load("models", architecture.family).Model(architecture)
    named = Named(model.to_empty(device="cpu"), architecture, sliced=run.train.zero_stage == 3)
    named.take(tensors)
    return named


def settings(run: Run, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a run; what it would guess is spelled out."""
    train = run.train
    values: dict[str, Any] = {
        "train_batch_size": train.global_batch_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.global_batch_size
        // (train.micro_batch_size * world_size),
        "gradient_clipping": train.gradient_clipping,
        "zero_optimization": {"stage": train.zero_stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    if train.precision == "bf16":
        values["bf16"] = {"enabled": True}
        values["data_types"] = {"grad_accum_dtype": "fp32"}
        values["communication_data_type"] = "fp32"
    return values


def _random_state() -> dict[str, Any]:
    accelerator = [
        backend.get_rng_state() for backend in (torch.cuda, torch.xpu) if backend.is_available()
    ]
    return {
        "random_rng_state": random.getstate(),
        # As plain numbers, so that the file can be read without unpickling code.
        "np_rng_state": [
            part.tolist() if isinstance(part, np.ndarray) else part
            for part in np.random.get_state()
        ],
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": accelerator[0] if accelerator else None,
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(tuple(state["np_rng_state"]))
    torch.set_rng_state(state["torch_rng_state"])
    for backend in (torch.cuda, torch.xpu):
        if backend.is_available() and state["cuda_rng_state"] is not None:
            backend.set_rng_state(state["cuda_rng_state"])


def _gather(value: dict[str, Any]) -> list[dict[str, Any]]:
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, value)
    return gathered
