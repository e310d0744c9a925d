"""Attention within the documents of a packed sample, by each method."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.testing import assert_close

from tests.support.accelerators import DEVICE, with_varlen
from tokamake.parallel import attention
from tokamake.parallel.attention import attention as attend
from tokamake.parallel.attention import by_document
from tokamake.parallel.document_mask import PackedDocuments, keep_ids
from tokamake.parallel.mesh import SINGLE_RANK
from tokamake.parallel.score_rules import ScoreRules

WIDTH, LENGTH = 16, 96
LONG = [[40, 56], [96], [1, 95]]
"""Lengths of the documents of each row."""
SHORT = [[1] * 96, [3] * 32, [90, 1, 1, 1, 1, 1, 1]]


def ids(lengths: list[list[int]]) -> Tensor:
    """Document id of each token."""
    rows = [[number for number, n in enumerate(row) for _ in range(n)] for row in lengths]
    return torch.tensor(rows)


def heads(groups: int) -> list[Tensor]:
    torch.manual_seed(groups)
    shapes = [(3, LENGTH, count, WIDTH) for count in (4, groups, groups)]
    # Token by token in memory, like the outputs of projections.
    return [torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes]


def seen(length: int, window: int | None) -> Tensor:
    """Whether a token of a document sees a token."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return causal if window is None else causal.triu(1 - window)


def masked(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[list[int]], window: int | None = None
) -> Tensor:
    """Compute the expected output with torch's masked attention in fp64."""
    documents = ids(lengths)
    same = documents[:, :, None] == documents[:, None]
    visible = (same & seen(documents.shape[1], window))[:, None]
    repeats = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(repeats, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q.double(), keys, values, attn_mask=visible).float()


class FlashAttention:
    """Stand-in for CUDA's flash attention, with the same signature and checks of arguments."""

    def __init__(self) -> None:
        self.calls = 0
        self.signature = inspect.signature(varlen.varlen_attn)
        self.__signature__ = self.signature

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        """See `varlen.varlen_attn`."""
        bound = self.signature.bind(*arguments, **named)
        bound.apply_defaults()
        self.calls += 1
        values = bound.arguments
        bounds = values["cu_seq_q"]
        assert bounds.dtype == values["cu_seq_k"].dtype == torch.int32
        earlier, later = values["window_size"]
        assert later == 0
        lengths = bounds.diff().tolist()
        assert values["max_q"] == values["max_k"] == max(lengths)
        qkv = (values[name].split(lengths) for name in ("query", "key", "value"))
        outputs = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in document),
                attn_mask=seen(len(document[0]), earlier + 1 or None),
                enable_gqa=values["enable_gqa"],
            )
            for document in zip(*qkv, strict=True)
        ]
        return torch.cat([output.transpose(0, 1) for output in outputs])


def check(lengths: list[list[int]], groups: int, window: int | None = None) -> None:
    """Check that output and gradients equal those of masked attention."""
    ours, theirs = heads(groups), heads(groups)
    rules = ScoreRules(window)
    if all(len(row) == 1 for row in lengths):  # no documents
        y = attend(*ours, axis=SINGLE_RANK.context, rules=rules)
    else:
        y = by_document(*ours, PackedDocuments(ids(lengths)), rules)
    expected = masked(*theirs, lengths, window)
    assert y.shape == expected.shape
    assert_close(y, expected)
    upstream = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(y, ours, upstream),
        torch.autograd.grad(expected, theirs, upstream),
        strict=True,
    )
    for gradient, expected_gradient in pairs:
        assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("lengths", [LONG, SHORT])
def test_tokens_attend_only_to_their_own_document(
    lengths: list[list[int]], groups: int, window: int | None
) -> None:
    check(lengths, groups, window)


@pytest.mark.parametrize("groups", [2, 4])
def test_flash_attention_takes_all_documents_in_one_call(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    stand_in = FlashAttention()
    monkeypatch.setattr(attention, "_at_once", lambda _: True)
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    check(LONG, groups)
    check(SHORT, groups)
    assert stand_in.calls == 2
    check(LONG, groups, window=9)
    check([[LENGTH]] * 3, groups, window=9)
    assert stand_in.calls == 4


def test_only_long_documents_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(q: Tensor, *rest: Any) -> Tensor:
        calls.append(len(q))
        return one_by_one(q, *rest)

    one_by_one = attention._one_by_one
    monkeypatch.setattr(attention, "_one_by_one", counted)
    check(SHORT, 4)
    assert not calls
    check(LONG, 4)
    assert calls == [3 * LENGTH]


def test_documents_end_with_their_row() -> None:
    """Equal ids at the end of a row and the start of the next one are two documents."""
    documents = PackedDocuments(torch.tensor([[0, 0, 1], [1, 1, 1]]))
    assert documents.lengths == [2, 1, 3]
    assert documents.bounds.tolist() == [0, 2, 3, 6]


def test_bounds_that_the_host_keeps_are_those_of_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    tensor = ids(LONG)
    found = PackedDocuments(tensor)
    keep_ids(tensor, tensor.numpy())
    kept = PackedDocuments(tensor)
    tensor.zero_()  # `kept` reads no element of the device
    expected = PackedDocuments(ids(LONG))
    assert kept.lengths == expected.lengths
    assert kept.bounds.tolist() == expected.bounds.tolist()
    assert kept.bounds.dtype == expected.bounds.dtype
    assert found.lengths == [tensor.shape[1]] * len(tensor)


@with_varlen
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [LONG, SHORT])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_flash_attention_on_a_gpu(
    groups: int, lengths: list[list[int]], dtype: torch.dtype
) -> None:
    ours, theirs = ([x.detach() for x in heads(groups)] for _ in range(2))
    ours = [x.to(DEVICE, dtype).requires_grad_() for x in ours]
    theirs = [x.to(dtype).float().requires_grad_() for x in theirs]
    assert attention._at_once(ours[0])
    y = by_document(*ours, PackedDocuments(ids(lengths).to(DEVICE)))
    expected = masked(*theirs, lengths)
    upstream = torch.randn_like(expected).to(dtype)
    gradients = torch.autograd.grad(y, ours, upstream.to(DEVICE))
    expected_gradients = torch.autograd.grad(expected, theirs, upstream.float())
    for x, reference in zip((y, *gradients), (expected, *expected_gradients), strict=True):
        assert_close(x.float().cpu(), reference, rtol=2e-2, atol=2e-2)
