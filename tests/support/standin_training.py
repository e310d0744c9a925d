"""Training steps on the stand-in accelerator and on the CPU: their numbers, and what they cost."""

from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen

from tests.support import standin_device
from tests.support.composition_axes import axes
from tests.support.compositions import Composition, learners
from tests.support.layouts import laid_out
from tests.support.standin_costs import Costs, counted, live_bytes
from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.parallel import attention, grouped_linear
from tokamake.prove.plain_training import rates
from tokamake.prove.random_samples import rank_ids, rank_samples, step_samples
from tokamake.runtime.ranks import Ranks
from tokamake.train.numerics import with_precision

CPU = torch.device("cpu")
NUM_STEPS = 2
CHANGES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "recomputation": {"recompute_granularity": "full"},
    "document masks": {"reset_attention_mask": True, "reset_position_ids": True},
    "norms of layers": {"log_layer_norms": True},
    "losses of corpora": {"log_corpus_losses": True},
    "dropout": {"dropout.hidden": 0.1, "dropout.attention": 0.1},
    **{name: {"optimizer.name": name} for name in axes()["optimizer.name"]},
}
"""Changes of a causal run whose code differs on a device."""
RUNS = {
    **{f"{family} {objective}": (family, objective, {}) for family, objective in learners()},
    **{f"llama causal, {change}": ("llama", "causal", of) for change, of in CHANGES.items()},
    "bert masked, packed": ("bert", "masked", {"pack_samples": True}),
}
"""Each family with each objective that it learns, and variants."""


class Trained(NamedTuple):
    """Some steps of training."""

    numbers: list[float]
    """Losses and norms of gradients, and the loss of a validation after them."""
    costs: Costs
    """Of the last step."""
    live: tuple[int, int]
    """Bytes on the device after the last but one step, and after the last one."""


def train(run: Run, device: torch.device) -> Trained:
    engine = plugins.load("train/backends", run.train.backend).Engine(
        with_precision(run, device), Ranks(0, 1, 0, 1), device=device
    )
    objective, mesh = engine.stages.objective, engine.mesh

    def validate() -> float:
        rows = rank_samples(step_samples(objective, step=NUM_STEPS), mesh)
        return float(engine.validate(iter(rows)).loss)

    numbers, bytes_after = list[float](), [0]
    for step in range(NUM_STEPS):
        rows = rank_samples(step_samples(objective, step=step), mesh)
        ids = rank_ids(objective, mesh, step=step)
        with counted() as costs:
            done = engine.train_step(rows, samples=ids, **rates(run, step))
        numbers += [done.loss, done.grad_norm]
        bytes_after.append(live_bytes())
    numbers.append(validate())
    return Trained(numbers, costs, (bytes_after[-2], bytes_after[-1]))


def train_on_both() -> dict[str, tuple[Trained, Trained]]:
    """Train each run on the CPU and on the stand-in, which has a kernel for products of groups."""
    device = standin_device.use()
    trained = {}
    with (
        patch.object(grouped_linear, "_has_kernel", lambda x, _: x.device.type == device.type),
        patch.object(grouped_linear, "_grouped_mm", _grouped_mm),
    ):
        for name, (family, objective, values) in RUNS.items():
            run = Composition(family, objective, values, seed=5).run()
            trained[name] = (train(run, CPU), train(run, device))
    return trained


def _grouped_mm(x_RD: Tensor, weight_GDE: Tensor, *, offs: Tensor) -> Tensor:
    """Products of all groups in one call, as masks: it waits for nothing."""
    places = torch.arange(len(x_RD), device=offs.device)
    groups_R = torch.searchsorted(offs, places, right=True)
    masks = (groups_R == group for group in range(len(weight_GDE)))
    products = (
        (x_RD * mask_R[:, None]) @ weight
        for mask_R, weight in zip(masks, weight_GDE.unbind(), strict=True)
    )
    return torch.stack([*products]).sum(0)


PASSES = {
    "documents, flash attention": {"precision": "bf16", "reset_attention_mask": True},
    "labels drawn": {"optimizer.name": "sophia_g"},
    "labels drawn, unequal labels": {"optimizer.name": "sophia_g", "eod_mask_loss": True},
}
"""Changes of a causal Llama that need a kernel of CUDA, or an extra pass in each step."""


def train_with_passes() -> dict[str, tuple[Trained, Trained]]:
    """Train the runs of `PASSES` on both: with flash attention, and an extra pass in each step."""
    device = standin_device.use()
    trained = {}
    for name, values in PASSES.items():
        run = Composition("llama", "causal", values, seed=5).run()
        if "sophia_g" in values.values():
            settings = run.train.optimizer.model_dump(exclude_unset=True)
            run = laid_out(run, {"optimizer": {**settings, "hessian_interval": 1}})
        with (
            patch.dict(attention._FLASH, {standin_device.NAME: lambda _: True}),
            patch.object(varlen, "varlen_attn", _varlen_attn),
        ):
            trained[name] = (train(run, CPU), train(run, device))
    return trained


def _varlen_attn(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    bounds: Tensor,
    *_: Any,
    window_size: Any,
    **__: Any,
) -> Tensor:
    """Flash attention of all documents in one call, as a mask: it waits for nothing."""
    places = torch.arange(len(q_THK), device=bounds.device)
    documents = torch.searchsorted(bounds, places, right=True)
    mask = (documents[:, None] == documents[None]) & (places[:, None] >= places)
    assert window_size == (-1, 0)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(
        0, 1
    )
