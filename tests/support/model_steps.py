"""Comparison of a family's model with transformers' over a step of training."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.hf_folder import to_hf
from tests.support.model_loss import mean_loss
from tokamake.config.architecture import Architecture


def assert_same_step(
    architecture: Architecture,
    model: nn.Module,
    *,
    oracle: nn.Module,
    losses: tuple[Tensor, Tensor],
    named: Mapping[str, Tensor] | None = None,
    stored: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Check that losses, their gradients and a step of AdamW equal those of transformers' model.

    `losses` are of our model and of the oracle; `named` are the oracle's parameters by the names in
    its files; `stored` turns values of them into values of its files.
    """
    loss, expected = losses
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    # Biases of keys do not change the softmax: a small eps would amplify their rounding errors.
    models = (model, oracle)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3) for each in models]
    loss.backward()
    expected.backward()
    gradients = _as_stored(architecture, model, gradients=True)
    named = named or dict(oracle.named_parameters())
    oracle_gradients = stored({name: each.grad for name, each in named.items()})
    assert gradients.keys() == oracle_gradients.keys()
    largest = max(gradient.abs().max() for gradient in oracle_gradients.values())
    for key, gradient in oracle_gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[key], gradient, atol=1e-5 * largest, rtol=1e-4)
    for optimizer in optimizers:
        optimizer.step()
    stepped = _as_stored(architecture, model, gradients=False)
    for key, parameter in stored({**named}).items():
        assert (stepped[key] - parameter).abs().max() <= 1e-6


def assert_same_gradients(model: Any, oracle: Any, tokens: Tensor) -> None:
    """Check logits, loss and gradients of a model that is stored as here, name by name."""
    with torch.no_grad():
        assert (model(tokens) - oracle(tokens).logits).abs().max() <= 1e-5
    loss, expected = mean_loss(model, tokens), oracle(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    loss.backward()
    expected.backward()
    gradients = {model.tensor_name(name): each.grad for name, each in model.named_parameters()}
    oracle_gradients = {name: each.grad for name, each in oracle.named_parameters()}
    assert gradients.keys() == oracle_gradients.keys()
    for key, gradient in oracle_gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[key], gradient, atol=2e-6, rtol=1e-4)


def _as_stored(architecture: Architecture, model: Any, *, gradients: bool) -> dict[str, Any]:
    """Weights or gradients of our model, by name and in the shape of transformers'."""
    values = {
        model.tensor_name(name): (each.grad if gradients else each).detach()
        for name, each in model.named_parameters()
    }
    return to_hf(architecture, values)
