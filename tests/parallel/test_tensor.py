"""Compare parallel layers with torch's own: values, gradients, uneven parts, collectives.

With three ranks, the last one has no row of a vocabulary of 4, and one row of a vocabulary of 7.
Shape suffixes: B batch, L tokens, D and E widths, V vocabulary.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.testing import assert_close

from tests.support.model_ranks import cut
from tests.support.ranks import spawn
from tokamake.config.parallel import ParallelSettings
from tokamake.parallel import collectives, mesh, placement, sharding, tensor, tied_embeddings
from tokamake.parallel import loss as loss_of_parts
from tokamake.parallel.axis import Axis
from tokamake.parallel.loss import NO_LABEL, cross_entropy, drawn
from tokamake.parallel.mesh import SINGLE_RANK, Mesh

pytestmark = pytest.mark.ranks

RANKS, B, L, D, E = 3, 2, 6, 4, 7


class Plain(nn.Module):
    """A small model with one of each kind of torch's own layers."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, D), nn.Embedding(L, D)
        self.rms, self.norm = nn.RMSNorm(D, eps=1e-5), nn.LayerNorm(D, eps=1e-5)
        self.column, self.row = nn.Linear(D, E), nn.Linear(E, D)
        self.all, self.back = nn.Linear(D, 6), nn.Linear(6, D)
        self.output = nn.Linear(D, vocabulary, bias=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.embedding(tokens_BL) + self.positions(torch.arange(L))
        x_BLD = x_BLD + self.row(self.column(self.rms(x_BLD)).tanh())
        x_BLD = x_BLD + self.back(self.all(x_BLD).tanh())
        return self.output(self.norm(x_BLD))


class Shared(nn.Module):
    """The same model with parallel layers."""

    def __init__(self, vocabulary: int, at: Mesh) -> None:
        super().__init__()
        self.at = at
        self.embedding = tensor.VocabParallelEmbedding(vocabulary, D, mesh=at)
        self.positions = tensor.ReplicatedEmbedding(L, D, mesh=at)
        self.rms, self.norm = tensor.RMSNorm(D, at, eps=1e-5), tensor.LayerNorm(D, at, eps=1e-5)
        self.column = tensor.ColumnParallelLinear(D, E, mesh=at, bias=True)
        self.row = tensor.RowParallelLinear(E, D, mesh=at, bias=True)
        rows = tensor.part(6, at.tensor)
        self.all = tensor.ReplicatedLinear(D, 6, mesh=at, rows=rows, bias=True)
        self.back = tensor.RowParallelLinear(6, D, mesh=at, bias=True)
        self.output = tensor.ColumnParallelLinear(D, vocabulary, mesh=at)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        at = self.at
        positions_BL = torch.arange(L).expand(B, L)
        x_BLD = self.embedding(tokens_BL) + self.positions(tensor.own_tokens(positions_BL, at))
        h_BLE = self.column(tensor.shared_input(self.rms(x_BLD), at))
        x_BLD = x_BLD + self.row(h_BLE.tanh())
        x_BLD = x_BLD + self.back(self.all(tensor.shared_input(x_BLD, at)).tanh())
        return self.output(tensor.shared_input(self.norm(x_BLD), at))


def plain(vocabulary: int) -> tuple[Plain, Tensor, Tensor, Tensor]:
    """A model with gradients, and the tokens, labels and loss that they come from."""
    torch.manual_seed(vocabulary)
    model = Plain(vocabulary)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    tokens_BL = torch.randint(vocabulary, (B, L))
    labels_BL = torch.randint(vocabulary, (B, L))
    labels_BL[0, 1], labels_BL[1] = NO_LABEL, torch.tensor([NO_LABEL] * 4 + [0, vocabulary - 1])
    logits = model(tokens_BL).flatten(0, 1)
    loss = F.cross_entropy(logits, labels_BL.flatten(), reduction="sum", ignore_index=NO_LABEL)
    loss.backward()
    return model, tokens_BL, labels_BL, loss.detach()


def layers(*, sequence_parallel: bool, vocabulary: int) -> None:
    """Check tensor-parallel layers: loss, gradients and norm."""
    settings = ParallelSettings(tensor_parallel_size=RANKS, sequence_parallel=sequence_parallel)
    at = mesh.build(settings, RANKS, device=torch.device("cpu"))
    theirs, tokens_BL, labels_BL, expected = plain(vocabulary)
    ours = Shared(vocabulary, at)
    placed, whole = placement.placements(ours), dict(theirs.named_parameters())
    assert {name for name, p in placed.items() if p.dim is not None} == {
        *("embedding.weight", "output.weight", "column.weight", "column.bias"),
        *("row.weight", "back.weight"),
    }
    shapes, names = {n: p.shape for n, p in whole.items()}, {n: n for n in whole}
    chunks = sharding.parameter_chunks(
        ours, placed, mesh=at, shapes=shapes, saved_names=names, tied_output=None
    )
    fill(chunks, whole)
    loss = cross_entropy(ours(tokens_BL), labels_BL, mesh=at, size=vocabulary)
    assert_close(loss, expected)
    loss.backward()
    for each in chunks:
        each.take_gradient()
    sharding.add_up_partial(chunks, at.tensor)
    for each in chunks:
        gradient = whole[each.name].grad
        assert gradient is not None
        assert each.local.grad is not None
        own_gradient = cut(gradient, each.placement, at.tensor)
        assert_close(each.local.grad, own_gradient, msg=each.name)
        assert_close(each.local.detach(), whole[each.name].detach()[each.place])
    assert_norm(chunks, whole)


@torch.no_grad()
def fill(chunks: list[sharding.ParameterChunk], whole: dict[str, nn.Parameter]) -> None:
    """Copy this rank's parts of the whole parameters."""
    for each in chunks:
        each.local.copy_(whole[each.name][each.place])


def assert_norm(chunks: list[sharding.ParameterChunk], whole: dict[str, nn.Parameter]) -> None:
    """Check that the squares of all ranks sum to those of the whole gradient."""
    squares = sharding.squares(chunks, torch.device("cpu"))
    dist.all_reduce(squares)
    gradients = [parameter.grad for parameter in whole.values() if parameter.grad is not None]
    assert_close(squares, sum((gradient.square().sum() for gradient in gradients), torch.zeros(())))
    sharding.scale(chunks, 0.5)
    halved = sharding.squares(chunks, torch.device("cpu"))
    dist.all_reduce(halved)
    assert_close(halved, squares / 4)


def sharded(*, replicas: int) -> None:
    """Check FSDP2's shards: parts that tile the whole, averaged gradients, their norm."""
    settings = ParallelSettings(data_parallel_replicate_size=replicas)
    at = mesh.build(settings, RANKS, device=torch.device("cpu"))
    theirs, tokens_BL, labels_BL, expected = plain(7)
    whole = dict(theirs.named_parameters())
    ours = Shared(7, SINGLE_RANK)
    placed = placement.placements(ours)
    policy = MixedPrecisionPolicy()
    sharding.shard(ours, [ours.embedding], at, policy=policy, reshard_after_forward=True)
    shapes, names = {n: p.shape for n, p in whole.items()}, {n: n for n in whole}
    chunks = sharding.parameter_chunks(
        ours, placed, mesh=at, shapes=shapes, saved_names=names, tied_output=None
    )
    fill(chunks, whole)
    loss = cross_entropy(ours(tokens_BL), labels_BL, mesh=at, size=7)
    assert_close(loss, expected)
    # Gradients are summed over the ranks, and each has the whole loss here.
    (loss / RANKS).backward()
    for each in chunks:
        each.take_gradient()
        gradient, counts = whole[each.name].grad, torch.zeros(shapes[each.name])
        assert gradient is not None
        if each.local.numel():
            assert_close(each.local.grad, gradient[each.place], msg=each.name)
            assert_close(each.local.detach(), whole[each.name].detach()[each.place])
            counts[each.place] = float(each.counts)
        dist.all_reduce(counts)
        assert (counts == 1).all(), each.name
    assert_norm(chunks, whole)


def copies() -> None:
    """Check an embedding in the first stage and its copy in the last one."""
    settings = ParallelSettings(pipeline_parallel_size=RANKS)
    at = mesh.build(settings, RANKS, device=torch.device("cpu"))
    name = {0: "embedding.weight", 1: "between.weight", 2: "output.weight"}[at.pipeline.rank]
    model = nn.ModuleDict({name.split(".")[0]: nn.Linear(2, 3, bias=False)})
    chunks = sharding.parameter_chunks(
        model, placement.placements(model), mesh=at,
        shapes={"e": torch.Size((3, 2))}, saved_names={name: "e"}, tied_output="output.weight",
    )  # fmt: skip
    (weight,) = chunks
    is_last = at.pipeline.rank == RANKS - 1
    assert (weight.is_tied_output, weight.counts) == (is_last, not is_last)
    weight.local.grad = torch.full((3, 2), 1.0 + at.pipeline.rank)
    tied_embeddings.add_up_copies(chunks, at.pipeline, name="embedding.weight")
    assert_close(weight.local.grad, torch.full((3, 2), 2.0 if at.pipeline.rank == 1 else 4.0))


def sums(axis: Axis, dim: int) -> None:
    """Check collectives and their gradients."""
    torch.manual_seed(dim + 9)
    shape = [4, 6, 9]
    whole_shape = list(shape)
    whole_shape[dim] *= RANKS
    xs, ws = torch.randn(RANKS, *shape).double(), torch.randn(RANKS, *whole_shape).double()
    x, w = xs[axis.rank].clone().requires_grad_(), ws[axis.rank]
    y = collectives.gather(x, axis, dim=dim)
    assert_close(y, torch.cat([*xs], dim))
    (y * w).sum().backward()
    assert_close(x.grad, ws.sum(0).chunk(RANKS, dim)[axis.rank])

    x = ws[axis.rank].clone().requires_grad_()
    y = collectives.scatter_sum(x, axis, dim=dim)
    assert_close(y, ws.sum(0).chunk(RANKS, dim)[axis.rank])
    (y * xs[axis.rank]).sum().backward()
    assert_close(x.grad, torch.cat([*xs], dim))

    x = xs[0].clone().requires_grad_()
    (collectives.copy(x, axis) * xs[axis.rank]).sum().backward()
    assert_close(x.grad, xs.sum(0))
    x = xs[axis.rank].clone().requires_grad_()
    y = collectives.add(x, axis)
    assert_close(y, xs.sum(0))
    (y * xs[0]).sum().backward()
    assert_close(x.grad, xs[0])


def losses(at: Mesh, vocabulary: int, dtype: torch.dtype) -> None:
    """Check the cross entropy of a divided vocabulary: large scores, and tokens without labels."""
    for room in (2**22, 8 * vocabulary):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss_of_parts, "_ROOM_ON_CPU", room)
            check_losses(at, vocabulary, dtype)


def check_losses(at: Mesh, vocabulary: int, dtype: torch.dtype) -> None:
    """See `losses`, which sets the room for the scores of a few tokens or of all."""
    torch.manual_seed(vocabulary)
    whole = (torch.randn(5, vocabulary) * 100).to(dtype).requires_grad_()
    labels = torch.tensor([0, vocabulary - 1, NO_LABEL, 1, 1])
    rows = tensor.part(vocabulary, at.tensor)
    own = whole.detach()[:, rows.start : rows.stop].clone().requires_grad_()
    expected = F.cross_entropy(whole.float(), labels, reduction="sum")
    # The gradient overwrites the logits, so they must not be a leaf.
    loss = cross_entropy(own * 1, labels, mesh=at, size=vocabulary)
    assert loss.dtype == torch.float32
    assert_close(loss, expected)
    (3 * expected).backward()
    (3 * loss).backward()
    assert whole.grad is not None
    assert_close(own.grad, whole.grad[:, rows.start : rows.stop])
    zero = cross_entropy(own * 1, torch.full_like(labels, NO_LABEL), mesh=at, size=vocabulary)
    own.grad = None
    zero.backward()
    assert zero == 0
    assert own.grad is not None
    assert not own.grad.any()
    cumulative = (whole.detach() / 100).float().softmax(-1).cumsum(-1)
    chances = torch.rand(len(cumulative))
    tokens = drawn(own.detach() / 100, chances, at, size=vocabulary)
    assert torch.equal(tokens, (cumulative <= chances[:, None] * cumulative[:, -1:]).sum(-1))


def check_all() -> None:
    """Run all checks in one launch of the ranks."""
    for vocabulary in (4, 7, 9):
        for sequence_parallel in (False, True):
            layers(sequence_parallel=sequence_parallel, vocabulary=vocabulary)
    at = mesh.build(ParallelSettings(tensor_parallel_size=RANKS), RANKS, device=torch.device("cpu"))
    for dim in (0, 1, 2, -1):
        sums(at.tensor, dim)
    for vocabulary in (4, 7):
        losses(at, vocabulary, torch.float32)
        losses(at, vocabulary, torch.bfloat16)
    sharded(replicas=1)
    sharded(replicas=RANKS)
    copies()


def test_layers_of_three_ranks_equal_those_of_one() -> None:
    spawn(check_all, RANKS)
