"""Adafactor (Shazeer & Stern 2018, arXiv 1804.04235): second moments as a row times a column."""

import torch
from torch import Tensor

from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._optimizer_base import Group, ParameterBatch, Rule, decay, number, wide
from tokamake.optim._sharded_parameters import WholeParameters, local

SETTINGS = {
    "beta2_decay": -0.8,
    "epsilon": 1e-30,
    "epsilon2": 1e-3,
    "clip_threshold": 1.0,
    "weight_decay": 0.0,
}
ELEMENTWISE = False
STATE = {
    "step": "replicated",
    "row_var": "replicated",
    "col_var": "replicated",
    "variance": "like_parameter",
}


def build(groups: list[Group], settings: OptimizerSettings, *, whole: WholeParameters) -> Rule:
    """Make the optimizer, without momentum; peak rates scale with parameters (paper: 1e-2)."""
    names = ("beta2_decay", "epsilon", "epsilon2", "clip_threshold")
    options = {name: settings.used(name) for name in names}
    return Adafactor(groups, whole=whole, lr=settings.learning_rate, **options)


class Adafactor(Rule):
    """Algorithms 4 and 5 of the paper, with decoupled weight decay as in torch.

    For a matrix, all ranks that hold parts keep the mean squares of whole rows and columns (of the
    last two dimensions).
    """

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Create the means of rows and columns of a matrix, or of each element of a vector."""
        shape = self.whole.shape(parameter)
        if len(shape) < 2:
            return {"step": number(), "variance": self.like(parameter)}
        zeros = torch.zeros((), dtype=wide(parameter), device=parameter.device)
        return {
            "step": number(),
            "row_var": zeros.new_zeros((*shape[:-1], 1)),
            "col_var": zeros.new_zeros((*shape[:-2], 1, shape[-1])),
        }

    def update(self, batch: ParameterBatch, group: Group) -> None:
        """x -= max(epsilon2, RMS(x)) min(lr, 1 / sqrt(step)) u / max(1, RMS(u) / threshold)."""
        steps, sizes = batch.tick(), self._mean_squares(batch, batch.values)
        decay(batch, group)
        updates = self._normalized(batch, group, steps=steps)
        lengths = self._mean_squares(batch, updates)
        for value, update, step, size, length in zip(
            batch.values, updates, steps, sizes, lengths, strict=True
        ):
            rate = min(group["lr"], step**-0.5) * size.sqrt().clamp(min=group["epsilon2"])
            clip = (length.sqrt() / group["clip_threshold"]).clamp(min=1.0)
            value.sub_(update.mul_(rate / clip))

    def _mean_squares(self, batch: ParameterBatch, tensors: list[Tensor]) -> list[Tensor]:
        sums = self.whole.sum(batch.parameters, [tensor.square().sum() for tensor in tensors])
        shapes = [torch.Size(self.whole.shape(each)) for each in batch.parameters]
        return [total / max(1, shape.numel()) for total, shape in zip(sums, shapes, strict=True)]

    def _normalized(
        self, batch: ParameterBatch, group: Group, *, steps: list[float]
    ) -> list[Tensor]:
        """Divide gradients by the roots of their estimated mean squares."""
        squares = [gradient.square().add_(group["epsilon"]) for gradient in batch.gradients]
        matrices = [n for n, state in enumerate(batch.states) if "row_var" in state]
        means = iter(self._means(batch, squares, matrices=matrices))
        updates = []
        for n, (state, step) in enumerate(zip(batch.states, steps, strict=True)):
            weight = step ** group["beta2_decay"]
            if "variance" in state:
                variance = local(state["variance"])
                variance.lerp_(squares[n], weight)
                updates.append(batch.gradients[n] * variance.rsqrt())
                continue
            for name in ("row_var", "col_var"):
                state[name].lerp_(next(means), weight)
            scale = self._inverse_roots(batch.parameters[n], state)
            updates.append(batch.gradients[n] * scale)
        return updates

    def _means(
        self, batch: ParameterBatch, squares: list[Tensor], *, matrices: list[int]
    ) -> list[Tensor]:
        """Means over the rows, then over the columns, of each whole matrix."""
        parameters, sums, counts = [], [], []
        for n in matrices:
            parameter = batch.parameters[n]
            shape = self.whole.shape(parameter)
            for dim in (-1, -2):
                total = squares[n].sum(dim=dim, keepdim=True)
                parameters.append(parameter)
                sums.append(self.whole.along(parameter, total, dim=dim))
                counts.append(shape[dim])
        totals = self.whole.sum(parameters, sums)
        return [total / count for total, count in zip(totals, counts, strict=True)]

    def _inverse_roots(self, parameter: Tensor, state: dict[str, Tensor]) -> Tensor:
        rows, columns = state["row_var"], state["col_var"]
        # Two factors, because the product of small squares would underflow in fp32.
        rows = (rows / rows.mean(dim=-2, keepdim=True)).rsqrt()
        return self.whole.part(parameter, rows) * self.whole.part(parameter, columns.rsqrt())
