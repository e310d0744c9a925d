"""Cost model: seconds of a training step by its parts, for a layout on a device.

The terms, their sources and the four fitted constants are on docs/explanation/cost-model.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tokamake.config.architecture import Architecture
from tokamake.estimate.parameters import has_gated_mlp
from tokamake.runtime.accelerators import Accelerator

PEAK_SHARE = 0.73
"""Fitted: share of its peak that a device reaches in very large matrix products."""
TILE = 32
"""Fitted: rows, columns and depth that a matrix product pays for beyond its own: tiles that are not
full, and their start and end."""
BANDWIDTH_SHARE = 0.70
"""Fitted: share of a data sheet's bandwidth that copies and collectives reach."""
EXPOSED_SHARE = 1 / 3
"""Fitted: share of the exchange of ZeRO stage 3 that passes could hide, and do not."""
LATENCY = 20e-6
"""Seconds of a collective without data. They decide only for small models."""

_STATES = 10
"""Numbers that norms, residuals and dropout of a layer read and write, for each of a state."""
_OPTIMIZER_BYTES = 30
"""Bytes that an optimizer step reads and writes for each parameter: fp32 weight, two states,
gradient, and the weight of the passes."""
_EXCHANGES = 4
"""Collectives of a layer's experts: numbers of rows, rows, their weights, results."""
_SCORES = 5
"""Times that softmax, mask and dropout read or write each score, if a kernel stores scores."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks share the work of a step."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Ranks, of those of data and context, that divide experts."""
    data: int = 1
    micro_batch: int = 1
    virtual: int = 1
    """Stages of a pipeline rank."""
    recompute: str = "none"
    """none, selective or full."""
    zero: int = 1
    sequence_parallel: bool = False
    stores_scores: bool = False
    """Whether attention writes its scores, as before fused kernels."""
    overlaps: bool = True
    """Whether gradients are exchanged during the last backward pass, without a pipeline."""

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


class RankParameters(NamedTuple):
    """Parameters of the largest stage on a tensor- and expert-parallel rank."""

    total: float
    experts: float = 0.0
    """Those of experts."""


class StepTime(NamedTuple):
    """Seconds of a step by their cause."""

    products: float
    """Matrix products of the layers and the output layer."""
    elementwise: float
    """Norms, activations, softmax: reads and writes of the device's memory."""
    tensor: float
    """All-reduces of tensor parallelism."""
    context: float
    """Keys and values that pass between ranks."""
    expert: float
    """Rows that go to their experts and back."""
    pipeline: float
    """States that pass between stages."""
    bubble: float
    """Waiting at the start and the end of a pipeline."""
    data: float
    """Gradients and weights between data-parallel ranks, as far as no pass hides them."""
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


class _Layer(NamedTuple):
    """Seconds of one layer and one micro batch, forward."""

    products: float
    elementwise: float
    tensor: float
    context: float
    expert: float


def step_time(
    architecture: Architecture,
    layout: Layout,
    *,
    device: Accelerator,
    global_batch: int,
    sequence_length: int,
    parameters: RankParameters,
    precision: str = "bf16",
) -> StepTime:
    """Seconds of one step."""
    costs = _Costs(
        architecture,
        layout,
        device=device,
        sequence_length=sequence_length,
        precision=precision,
    )
    num_batches = global_batch // (layout.micro_batch * layout.data)
    forward = costs.layer()
    # The backward pass has two products for each one of the forward pass.
    again = layout.recompute == "full"
    passes = _Layer(
        products=(3 + again) * forward.products,
        elementwise=(3 + (layout.recompute != "none")) * forward.elementwise,
        tensor=(2 + again) * forward.tensor,
        context=(3 + again) * forward.context,
        expert=(2 + again) * forward.expert,
    )
    # The last stage is the slowest: layers that predict further tokens have logits of their own.
    num_further = architecture.num_mtp_layers
    num_layers = architecture.num_hidden_layers / layout.pipeline + num_further
    hop = 2 * layout.virtual * costs.hop()
    logits, of_loss = ((1 + num_further) * each for each in costs.logits())
    stage = num_layers * sum(passes) + hop
    data, optimizer = costs.data(parameters.total), costs.optimizer(parameters)
    if layout.zero == 3:  # weights and gradients of a layer travel while others are computed
        exchange = costs.sharded(parameters.total, num_layers)
        exposed = max(0.0, exchange - stage) + EXPOSED_SHARE * min(exchange, stage)
        data = num_batches * exposed
    elif layout.pipeline == 1 and layout.overlaps:
        data = max(0.0, data - num_layers * 2 * forward.products)
    return StepTime(
        products=num_batches * (num_layers * passes.products + logits),
        elementwise=num_batches * (num_layers * passes.elementwise + of_loss),
        tensor=num_batches * num_layers * passes.tensor,
        context=num_batches * num_layers * passes.context,
        expert=num_batches * num_layers * passes.expert,
        pipeline=num_batches * hop,
        bubble=(layout.pipeline - 1) / layout.virtual * stage,
        data=data,
        optimizer=optimizer,
    )


class _Costs:
    """Times of parts of a step; suffixes: tokens of a micro batch on this rank are rows."""

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        *,
        device: Accelerator,
        sequence_length: int,
        precision: str,
    ) -> None:
        self._shape, self._layout, self._device = architecture, layout, device
        self._peak = PEAK_SHARE * device.peak(precision)
        self._number_bytes = 4 if precision == "fp32" else 2
        self._length = sequence_length
        self._rows = layout.micro_batch * sequence_length / layout.context
        self._memory = BANDWIDTH_SHARE * device.memory_bandwidth
        self._link = BANDWIDTH_SHARE * device.link_bandwidth
        self._network = BANDWIDTH_SHARE * device.network_bandwidth
        self._has_gate = has_gated_mlp(architecture)

    def _product(self, rows: float, columns: float, *, depth: float) -> float:
        padded = (rows + TILE) * (columns + TILE) * (depth + TILE)
        return 2 * padded / self._peak

    def layer(self) -> _Layer:
        """Forward pass of a layer."""
        shape, layout, rows = self._shape, self._layout, self._rows
        tensor, hidden = layout.tensor, shape.hidden_size
        query, inner = shape.query_size / tensor, shape.used_mlp_size / tensor
        key_value = shape.key_value_size / min(tensor, shape.num_key_value_heads)
        gates = 1 + self._has_gate
        heads = layout.micro_batch * shape.num_attention_heads / tensor
        width = shape.query_size / shape.num_attention_heads
        own_length = self._length / layout.context
        products = (
            self._product(rows, query + 2 * key_value, depth=hidden)
            + self._product(rows, hidden, depth=query)
            + self._product(rows, gates * inner, depth=hidden)
            + self._product(rows, hidden, depth=inner)
            + heads * 2 * self._product(own_length, self._length, depth=width)
        )
        shared = tensor if layout.sequence_parallel else 1
        numbers = rows * (
            _STATES * hidden / shared + (1 + gates) * inner + 2 * (query + 2 * key_value)
        )
        if layout.stores_scores:
            numbers += _SCORES * heads * own_length * self._length
        num_bytes, passes = self._number_bytes, layout.context - 1
        state = num_bytes * rows * hidden
        reduced = 2 * (tensor - 1) / tensor * state / self._speed(tensor) + LATENCY * (tensor > 1)
        passed = num_bytes * 2 * rows * key_value / self._speed(tensor * layout.context)
        return _Layer(
            products,
            num_bytes * numbers / self._memory,
            tensor=2 * reduced,
            context=passes * (passed + LATENCY),
            expert=self._exchanged(state),
        )

    def _exchanged(self, state: float) -> float:
        """Rows to the ranks of their experts, and back: each token once for each of its experts."""
        ranks = self._layout.expert
        if ranks == 1:
            return 0.0
        rows = self._shape.setting("num_experts_per_tok") * state * (ranks - 1) / ranks
        speed = self._speed(self._layout.tensor * ranks)
        return 2 * rows / speed + _EXCHANGES * LATENCY

    def logits(self) -> tuple[float, float]:
        """Both passes of the output layer, and of the loss, for a micro batch."""
        assert self._shape.vocab_size is not None
        columns = self._shape.vocab_size / self._layout.tensor
        product = 3 * self._product(self._rows, columns, depth=self._shape.hidden_size)
        return product, 3 * self._rows * columns * 4 * 2 / self._memory

    def hop(self) -> float:
        """A state on its way to the next stage: tensor-parallel ranks send a part each."""
        layout = self._layout
        if layout.pipeline == 1:
            return 0.0
        state = self._number_bytes * self._rows * self._shape.hidden_size / layout.tensor
        return state / self._network + LATENCY

    def data(self, parameters: float) -> float:
        """All-reduce of gradients, or a reduce-scatter and an all-gather of as many bytes."""
        ranks = self._layout.data * self._layout.context
        gradients = self._number_bytes * parameters
        return 2 * (ranks - 1) / ranks * gradients / self._between_replicas()

    def sharded(self, parameters: float, num_layers: float) -> float:
        """ZeRO stage 3: all-gathers of weights for both passes, and a reduce-scatter of gradients.

        Small collectives, a layer at a time, reach the bandwidth of one adapter (table 2 of arXiv
        2104.04473).
        """
        sent = self._number_bytes * parameters / self._speed(self._layout.ranks)
        return 3 * (sent + LATENCY * num_layers)

    def optimizer(self, parameters: RankParameters) -> float:
        sharers = self._layout.data * self._layout.context if self._layout.zero else 1
        own = (parameters.total - parameters.experts) / sharers
        own += parameters.experts / max(1, sharers // self._layout.expert)
        return _OPTIMIZER_BYTES * own / self._memory

    def _speed(self, ranks: int) -> float:
        """Bandwidth among consecutive ranks: they are in one node, or use the network."""
        return self._link if ranks <= self._device.per_node else self._network

    def _between_replicas(self) -> float:
        """Bandwidth of a rank to its replicas: the ranks of a node share all its adapters."""
        layout, per_node = self._layout, self._device.per_node
        inner = layout.tensor
        if inner * layout.context * layout.data <= per_node:
            return self._link
        return min(self._link, self._network * max(1, per_node // inner))
