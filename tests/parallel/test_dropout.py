"""Masks of dropout follow from counters; a model with them equals that of transformers."""

from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.support.gpts import LEARNED, reference, tensors_of
from tests.support.hf_folder import from_hf
from tests.support.model_ranks import tokens_of
from tokamake.checkpoint.model_tensors import to_model
from tokamake.models.common.language_model import DropoutRates
from tokamake.parallel.axis import SINGLE_RANK_AXIS, Axis
from tokamake.parallel.dropout import Dropout, SampleTokens, Site


class Layer(NamedTuple):
    """Stand-in for the attention of a layer."""

    number: int


SEED = 7
SAMPLES = torch.tensor([5, 900_000_000_000])


def dropout(samples: Tensor = SAMPLES, length: int = 64, **changes: Any) -> Dropout:
    rates = {"hidden": 0.3, "attention": 0.2, "embedding": 0.1, "seed": SEED}
    tokens = SampleTokens(samples[:, None], torch.arange(length)[None])
    return Dropout(**rates | changes, tokens=tokens, heads=range(4))


def kept(site: Site = "mlp_output", *, layer: int = 0, **changes: Any) -> Tensor:
    """Which of (samples, 64, 128) ones are kept."""
    drop = dropout(**changes)
    return drop.states(torch.ones(len(drop.tokens.numbers), 64, 128), site, layer=Layer(layer)) > 0


def test_the_rate_is_that_of_the_setting_and_the_mean_stays() -> None:
    ones = torch.ones(2, 256, 1024)
    for site, rate in (("attention_output", 0.3), ("mlp_output", 0.3), ("embedding", 0.1)):
        dropped = dropout(length=256).states(ones, site)  # type: ignore[arg-type]
        assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - rate)])
        assert (dropped == 0).float().mean().item() == pytest.approx(rate, abs=0.002)
        # Each row and each column has its share, too.
        for dim in (0, 1, 2):
            assert (dropped == 0).float().mean(dim).std() < 0.6
    weights = torch.ones(2, 4, 256, 256)
    dropped = dropout(length=256).weights(weights, SINGLE_RANK_AXIS, layer=Layer(3))
    assert (dropped == 0).float().mean().item() == pytest.approx(0.2, abs=0.002)


def test_masks_of_all_places_differ_like_independent_ones() -> None:
    masks = [
        kept(),
        kept("attention_output"),
        kept(layer=1),
        kept(seed=SEED + 1),
        kept(samples=SAMPLES + 1),
        kept().roll(1, 0),
        kept().roll(1, 1),
        kept().roll(1, 2),
    ]
    for a, b in combinations(masks, 2):
        # Two masks with a rate of 0.3 agree at 0.7 * 0.7 + 0.3 * 0.3 of their places.
        assert (a == b).float().mean().item() == pytest.approx(0.58, abs=0.02)


def test_a_token_has_the_same_mask_in_any_batch_and_on_any_rank() -> None:
    whole = kept()
    assert torch.equal(kept(samples=SAMPLES[1:]), whole[1:])
    part = dropout()._replace(tokens=SampleTokens(SAMPLES[:, None], torch.arange(16, 32)[None]))
    ones = torch.ones(2, 16, 128)
    assert torch.equal(part.states(ones, "mlp_output") > 0, whole[:, 16:32])
    weights = torch.ones(2, 4, 8, 8)
    of_all = dropout().weights(weights, SINGLE_RANK_AXIS, layer=Layer(0))
    for rank in range(2):
        of_rank = dropout().weights(weights[:, :2], Axis(rank, 2), layer=Layer(0))
        assert torch.equal(of_rank, of_all[:, 2 * rank : 2 * rank + 2])
    others = dropout()._replace(heads=range(2, 4))
    assert torch.equal(
        others.weights(weights[:, :2], SINGLE_RANK_AXIS, layer=Layer(0)), of_all[:, 2:]
    )


def test_samples_that_share_rows_have_the_masks_of_rows_of_their_own() -> None:
    # The first row has the second sample, then the first one; the second row has only padding.
    lengths = (5, 3)
    numbers = torch.tensor([[SAMPLES[1]] * 3 + [SAMPLES[0]] * 5, [0] * 8])
    positions = torch.tensor([[*range(3), *range(5)], [0] * 8])
    rows = SampleTokens(numbers, positions)
    packed = dropout()._replace(tokens=rows, whole_rows=rows, memory_positions=positions)
    apart = dropout(length=8)
    states = apart.states(torch.ones(2, 8, 128), "mlp_output")
    shared = packed.states(torch.ones(2, 8, 128), "mlp_output")
    assert torch.equal(shared[0], torch.cat((states[1, :3], states[0, :5])))
    for site in ("attention", "cross_attention"):
        ones, options = torch.ones(2, 4, 8, 8), {"layer": Layer(1), "site": site}
        weights = apart.weights(ones, SINGLE_RANK_AXIS, **options)  # type: ignore[arg-type]
        of_row = packed.weights(ones, SINGLE_RANK_AXIS, **options)[0]  # type: ignore[arg-type]
        for sample, own in ((1, slice(0, lengths[1])), (0, slice(lengths[1], 8))):
            length = lengths[sample]
            assert torch.equal(of_row[:, own, own], weights[sample, :, :length, :length])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_dropped_like_the_states(dtype: torch.dtype) -> None:
    x = torch.randn(2, 64, 128, dtype=dtype, requires_grad=True)
    gradient = torch.randn(2, 64, 128, dtype=dtype)
    y = dropout().states(x, "mlp_output")
    y.backward(gradient)
    mask = kept()
    assert torch.equal(y, torch.where(mask, x / 0.7, 0))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(mask, gradient / 0.7, 0))


class Masked(nn.Module):
    """In place of a dropout of transformers: our mask of a place."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(x)
        return result


@pytest.mark.parametrize("packed", [False, True])
def test_logits_and_gradients_equal_transformers_with_the_same_masks(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle: Any = reference(LEARNED).eval()
    oracle.set_attn_implementation("eager")
    model: Any = to_model(LEARNED, from_hf(LEARNED, tensors_of(oracle)))
    tokens = tokens_of(LEARNED, 32)
    samples = torch.arange(len(tokens)) + 40
    model.dropout_rates = DropoutRates(0.3, 0.2, 0.1, SEED)
    drop = Dropout(
        *model.dropout_rates,
        tokens=SampleTokens(samples[:, None], torch.arange(32)[None]),
        heads=range(LEARNED.num_attention_heads),
    )
    transformer = oracle.transformer
    transformer.drop = Masked(lambda x: drop.states(x, "embedding"))
    for number, layer in enumerate(transformer.h):
        layer.attn.resid_dropout = Masked(
            lambda x, number=number: drop.states(x, "attention_output", layer=Layer(number))
        )
        layer.mlp.dropout = Masked(
            lambda x, number=number: drop.states(x, "mlp_output", layer=Layer(number))
        )
        # transformers drops weights of attention by this function, layer by layer.
        layer.attn.training, layer.attn.attn_dropout.p = True, 0.2
    layers = iter(range(len(transformer.h)))

    def drop_weights(weights: Tensor, p: float, training: bool) -> Tensor:
        assert (p, training) == (0.2, True)
        return drop.weights(weights, SINGLE_RANK_AXIS, layer=Layer(next(layers)))

    monkeypatch.setattr(nn.functional, "dropout", drop_weights)
    inputs: dict[str, Tensor] = {"sample_numbers": samples}
    expected = oracle(tokens).logits
    if packed:  # one document: its mask changes nothing
        inputs["document_ids"] = torch.zeros_like(tokens)
    logits = model(tokens, **inputs)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    logits.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(
        model.embed_tokens.weight.grad, transformer.wte.weight.grad, atol=1e-3, rtol=1e-4
    )
    # Without the numbers of samples, nothing is dropped.
    assert not torch.allclose(model(tokens), logits, atol=1e-2)
