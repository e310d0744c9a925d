"""Compare attention over context-parallel ranks with torch's own attention on one rank."""

import itertools
import math
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.support.accelerators import DEVICE, MARKS
from tests.support.ranks import spawn
from tokamake.errors import UserError
from tokamake.models.common.recompute import NONE, Recompute, run
from tokamake.parallel import ring_kernels
from tokamake.parallel.attention import attention
from tokamake.parallel.axis import Axis
from tokamake.parallel.context import Method, check_heads, check_length, share, zigzag_indices
from tokamake.parallel.document_mask import Documents, document_mask
from tokamake.parallel.mesh import SINGLE_RANK
from tokamake.parallel.score_rules import PLAIN_SCORES, ScoreRules

GPU = pytest.param(DEVICE.type, marks=MARKS, id="accelerator")

Shapes = list[tuple[int, ...]]
# Batch, query heads, key heads, tokens, width of a head. Chunks of one token and of odd lengths.
SHAPES: Shapes = [(2, 4, 4, 48, 16), (1, 8, 2, 40, 8), (3, 4, 1, 24, 16), (1, 12, 3, 8, 32)]
ODD_HEADS: Shapes = [(2, 3, 3, 24, 16), (1, 9, 3, 16, 24), (2, 5, 1, 40, 8)]
# Lengths of documents: within a chunk, across chunks and ranks, of one token, of a whole sample.
DOCUMENTS = {
    48: [[3, 1, 7, 20, 17], [48]],
    40: [[10, 10, 10, 10]],
    24: [[24], [1, 22, 1], [5, 5, 5, 9]],
    8: [[2, 5, 1]],
    16: [[7, 9]],
}

RULES = [
    ScoreRules(window=5),
    ScoreRules(softcap=2.0),
    ScoreRules(window=11, softcap=1.5),
    ScoreRules(window=7, sinks=torch.linspace(-2, 3, 12)),
]

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
"""Largest error by dtype, relative to the largest value; those of 16 bits are a few roundings."""


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, the same on all ranks."""
    batch, heads, groups, length, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    return [
        torch.randn(batch, number, length, width, generator=generator).to(dtype)
        for number in (heads, groups, groups, heads)
    ]


def ids_of(shape: tuple[int, ...]) -> Tensor:
    """Document ids of each row of the batch; rows repeat if `DOCUMENTS` has fewer."""
    rows = DOCUMENTS[shape[3]]
    return torch.stack(
        [
            torch.arange(len(row)).repeat_interleave(torch.tensor(row))
            for row in itertools.islice(itertools.cycle(rows), shape[0])
        ]
    )


def by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dy: Tensor,
    ids: Tensor | None = None,
    rules: ScoreRules = PLAIN_SCORES,
) -> list[Tensor]:
    """Compute the output and the gradients with torch's attention in fp32."""
    q, k, v, dy = (x.float().detach() for x in (q, k, v, dy))
    length = q.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if rules.window is not None:
        mask = mask.triu(1 - rules.window)
    if ids is not None:
        mask = (mask & (ids[:, :, None] == ids[:, None]))[:, None]
    leaves = [q, k, v, *sinks_of(rules, q)]
    with torch.enable_grad():
        q, k, v, *sinks = (x.requires_grad_() for x in leaves)
        if rules.needs_scores:
            repeats = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(repeats, 1).mT / math.sqrt(q.shape[-1])
            if rules.softcap:
                scores = torch.tanh(scores / rules.softcap) * rules.softcap
            scores = scores.masked_fill(~mask, -math.inf)
            columns = [each[:, None, None].expand(*scores.shape[:3], 1) for each in sinks]
            weights = torch.cat([scores, *columns], -1).softmax(-1)[..., :length]
            y = weights @ v.repeat_interleave(repeats, 1)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def sinks_of(rules: ScoreRules, q: Tensor) -> list[Tensor]:
    """The sinks of the heads of queries, if there are any."""
    return [] if rules.sinks is None else [rules.sinks[: q.shape[1]].clone()]


def error(ours: Tensor, theirs: Tensor, axis: Axis = SINGLE_RANK.context) -> float:
    """Largest error of a rank's share, relative to the largest value of the whole."""
    own = share(theirs, axis=axis, dim=2) if theirs.dim() > 1 else theirs
    return float((ours - own).abs().max() / theirs.abs().max())


def on_this_rank(
    method: Method,
    axis: Axis,
    tensors: list[Tensor],
    ids: Tensor | None = None,
    recompute: Recompute = NONE,
    rules: ScoreRules = PLAIN_SCORES,
) -> list[Tensor]:
    """Compute the output and the gradients of a rank's share, in the dtype of the inputs."""
    q, k, v, dy = (share(x, axis=axis, dim=2) for x in tensors)
    mask = None
    if ids is not None:
        mask = document_mask(share(ids, axis=axis), axis=axis, method=method)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *sinks_of(rules, q))]
    for each in leaves[3:]:
        rules = rules._replace(sinks=each)
    call: Any = partial(attention, axis=axis, method=method, mask=mask, rules=rules)
    with torch.enable_grad():
        y = run([call], recompute, *leaves[:3])
    results = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    assert all(x.dtype == q.dtype for x in results)
    if axis.size > 1:  # each rank has the gradient by its queries, or its heads
        for each in results[4:]:
            dist.all_reduce(each, group=axis.group)
    return results


def errors(method: Method, axis: Axis, shapes: list[tuple[int, ...]]) -> dict[str, float]:
    """Errors of a rank by case, relative to the tolerance of the dtype."""
    by_case = {}
    plain = itertools.product(shapes, (False, True), TOLERANCES, (PLAIN_SCORES,))
    ruled = itertools.product(shapes, (False, True), (torch.float32,), RULES)
    for shape, apart, dtype, rules in (*plain, *ruled):
        tensors, ids = inputs(shape, dtype), ids_of(shape) if apart else None
        ours = on_this_rank(method, axis, tensors, ids, rules=rules)
        case = f"{method} {shape} apart={apart} {dtype} {rules}"
        names, expected = "yqkvs"[: len(ours)], by_torch(*tensors, ids, rules)
        for name, x, y in zip(names, ours, expected, strict=True):
            by_case[f"{case} {name}"] = error(x, y, axis) / TOLERANCES[dtype]
        granularity: Any = "full" if dtype == torch.float32 else "selective"
        recomputed = on_this_rank(method, axis, tensors, ids, Recompute(granularity), rules)
        differ = [not torch.equal(x, y) for x, y in zip(ours, recomputed, strict=True)]
        by_case[f"{case} {granularity}"] = 2.0 * any(differ)
    return by_case


def all_errors(plain: bool, shapes: Shapes, odd: Shapes) -> dict[str, float]:
    """Errors over all ranks; on four ranks, also over two groups of two at the same time."""
    if plain:
        patch.object(ring_kernels.ForCPU, "serves", return_value=False).start()
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = Axis(rank, size, dist.group.WORLD)
    by_case = errors("ring", whole, shapes + odd) | errors("ulysses", whole, shapes)
    if size == 4:
        # Ranks 0 and 2, 1 and 3, so that ranks in the group differ from global ranks.
        halves = [dist.new_group([half, half + 2]) for half in range(2)]
        half = Axis(rank // 2, 2, halves[rank % 2])
        for method in ("ring", "ulysses"):
            for case, value in errors(method, half, SHAPES[:1]).items():
                by_case[f"{case} of a half"] = value
    return by_case


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "plain", "shapes", "odd"),
    [
        (2, False, SHAPES[:2], ODD_HEADS[:1]),
        pytest.param(2, False, SHAPES[2:], ODD_HEADS[1:], marks=pytest.mark.grid),
        pytest.param(2, True, SHAPES, ODD_HEADS, marks=pytest.mark.grid),
        pytest.param(4, False, SHAPES, ODD_HEADS, marks=pytest.mark.grid),
    ],
)
def test_several_ranks_equal_one_rank(ranks: int, plain: bool, shapes: Shapes, odd: Shapes) -> None:
    for by_case in spawn(all_errors, ranks, plain, shapes, odd):
        assert len(by_case) >= 60 * (2 * len(shapes) + len(odd))
        assert {case: value for case, value in by_case.items() if not value <= 1} == {}


@pytest.mark.parametrize("rules", [PLAIN_SCORES, *RULES])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", SHAPES + ODD_HEADS)
def test_one_rank_equals_torchs_attention(
    shape: tuple[int, ...], apart: bool, rules: ScoreRules
) -> None:
    tensors, ids = inputs(shape), ids_of(shape) if apart else None
    expected = by_torch(*tensors, ids, rules)
    for x, y in zip(on_this_rank("ring", Axis(), tensors, ids, rules=rules), expected, strict=True):
        assert error(x, y) <= 1e-5


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(40, 0.0, None), (128, 3.0, None), (200, 0.0, None), (130, 0.0, torch.linspace(-1, 2, 4))],
)
def test_blocks_of_queries_see_their_windows(
    window: int, softcap: float, sinks: Tensor | None
) -> None:
    tensors, rules = inputs((2, 4, 2, 300, 8)), ScoreRules(window, softcap, sinks=sinks)
    ids = torch.arange(2 * 300).view(2, 300) // 150
    for documents in (None, ids, torch.arange(2 * 300).view(2, 300) // 7):
        expected = by_torch(*tensors, documents, rules)
        ours = on_this_rank("ring", Axis(), tensors, documents, rules=rules)
        assert all(error(x, y) <= 1e-5 for x, y in zip(ours, expected, strict=True))
    kept = rules._replace(drop=lambda weights: weights)
    dropped = on_this_rank("ring", Axis(), tensors, ids, rules=kept)
    expected = by_torch(*tensors, ids, rules)
    assert all(error(x, y) <= 1e-5 for x, y in zip(dropped, expected, strict=True))


@pytest.mark.parametrize("biased", [False, True])
def test_fp16_is_fp32_rounded_once(biased: bool) -> None:
    *halves, dy = inputs((2, 4, 2, 24, 8), torch.float16)
    wholes = [x.float().requires_grad_() for x in halves]
    bias = torch.linspace(-3, 0, 24).half().expand(2, 1, 24, 24) if biased else None
    y = attention(*[x.requires_grad_() for x in halves], axis=Axis(), mask=bias)
    expected = attention(*wholes, axis=Axis(), mask=bias.float() if bias is not None else None)
    assert torch.equal(y, expected.half())
    for ours, exact in zip(
        torch.autograd.grad(y, halves, dy),
        torch.autograd.grad(expected, wholes, dy.float()),
        strict=True,
    ):
        assert torch.equal(ours, exact.half())


def test_keys_of_earlier_tokens_are_seen() -> None:
    q, k, v, dy = inputs((2, 4, 2, 24, 8))
    expected = by_torch(q, k, v, dy)[0]
    for start in (5, 23):
        y = attention(q[:, :, start:], k, v, axis=Axis())
        torch.testing.assert_close(y, expected[:, :, start:])
        for rules in (RULES[2], RULES[3]._replace(sinks=torch.linspace(-2, 3, 4))):
            ruled = attention(q[:, :, start:], k, v, axis=Axis(), rules=rules)
            whole = by_torch(q, k, v, dy, rules=rules)[0]
            torch.testing.assert_close(ruled, whole[:, :, start:])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shares_cover_a_sequence_and_are_balanced(size: int) -> None:
    length = 12 * size
    shares = [zigzag_indices(length, Axis(rank, size)) for rank in range(size)]
    assert torch.equal(torch.cat(shares).sort().values, torch.arange(length))
    assert len({int(indices.sum()) for indices in shares}) == 1
    rows = torch.randn(2, length, 3)
    for rank, indices in enumerate(shares):
        assert torch.equal(share(rows, axis=Axis(rank, size)), rows[:, indices])
        assert torch.equal(share(rows[0], axis=Axis(rank, size), dim=0), rows[0, indices])


def test_chunks_are_related_by_the_documents_that_they_share() -> None:
    ids = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 2], [4, 4, 4, 4, 5, 5, 5, 5]])
    relations = Documents.of(ids.view(2, 4, 2)).relations
    assert relations == [
        ["same", "same", "mixed", "apart"],
        ["same", "same", "mixed", "apart"],
        ["mixed", "mixed", "mixed", "mixed"],
        ["apart", "apart", "mixed", "same"],
    ]


def test_the_efficient_kernel_serves_aligned_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_kernels, "_allowed", lambda *_, **__: True)
    for length, width, is_served in ((32, 8, True), (33, 8, False), (32, 12, False)):
        x = torch.zeros(1, 1, length, width)
        assert (
            ring_kernels.MemoryEfficient.serves(ring_kernels.AttentionBlock(x, x, x)) == is_served
        )


def test_indivisible_lengths_and_heads_are_refused() -> None:
    check_length(1023, 1)
    check_length(1024, 4)
    message = (
        r"train\.sequence_length: 1023: not a multiple of 2 × context_parallel_size 4, .*"
        "make it 1024"
    )
    with pytest.raises(UserError, match=message):
        check_length(1023, 4)
    with pytest.raises(UserError, match=message):
        share(torch.zeros(1, 1023), axis=Axis(1, 4))
    check_heads(12, 4)
    message = (
        "num_attention_heads / tensor_parallel_size: 6 heads are not a multiple of "
        "context_parallel_size 4"
    )
    with pytest.raises(UserError, match=message):
        check_heads(6, 4)
    q, k, v, _ = inputs((1, 6, 2, 16, 8))
    with pytest.raises(UserError, match=message):
        attention(q, k, v, axis=Axis(0, 4), method="ulysses")


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 2, 1184, 64), (1, 3, 3, 96, 32)])
def test_kernels_agree(
    shape: tuple[int, ...], apart: bool, dtype: torch.dtype, device: str
) -> None:
    """Compare each kernel that supports a causal block with torch's attention."""
    tensors = [x.to(device) for x in inputs(shape, dtype)]
    length = shape[3]
    ids = torch.arange(length).mul(5).div(length, rounding_mode="floor").repeat(shape[0], 1)
    bias = None
    if apart:
        visible = (ids[:, :, None] == ids[:, None]).tril().to(device)
        bias = torch.zeros(visible.shape, dtype=dtype, device=device)
        bias = bias.masked_fill(~visible, torch.finfo(dtype).min / 2)[:, None]
    block = ring_kernels.AttentionBlock(*tensors[:3], causal=not apart, bias=bias)
    expected = by_torch(*(x.cpu() for x in tensors), ids if apart else None)
    all_kernels = (
        ring_kernels.ForCPU,
        ring_kernels.Flash,
        ring_kernels.MemoryEfficient,
        ring_kernels.Plain,
    )
    supported = [kernel for kernel in all_kernels if kernel.serves(block)]
    assert ring_kernels.kernel(block) is supported[0]
    assert len(supported) > 1
    for kernel in supported:
        y, lse = kernel.forward(block)
        gradients = kernel.backward(block, tensors[3], y.to(dtype), lse)
        for name, x, reference in zip("yqkv", (y, *gradients), expected, strict=True):
            assert error(x.cpu(), reference) <= TOLERANCES[dtype], (kernel, name)
