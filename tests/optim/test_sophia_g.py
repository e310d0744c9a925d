"""Sophia-G: the formula of its paper, and its estimate of the Hessian."""

import numpy as np
import torch

from tests.support.optimizers import (
    RATES,
    Arrays,
    assert_same,
    extra_pass,
    gradients,
    make,
    start,
    walk,
)
from tokamake.optim._extra_pass import Relabel


def test_sophia_follows_its_paper() -> None:
    values = {"beta1": 0.8, "beta2": 0.9, "rho": 0.05, "epsilon": 1e-6, "weight_decay": 0.5}
    parameters, labels = start(), 12
    optimizer = make("sophia_g", parameters, hessian_interval=2, **values)
    expected: Arrays = {name: p.detach().numpy().copy() for name, p in parameters.items()}
    m, h = ({name: np.zeros_like(x) for name, x in expected.items()} for _ in range(2))
    for step, rate in enumerate(RATES):
        asked = list[Relabel]()
        for name, sampled in gradients(step + 100).items():
            parameters[name].grad = sampled
            if step in (0, 2):
                h[name] = 0.9 * h[name] + 0.1 * labels * sampled.numpy() ** 2
        optimizer.prepare(extra_pass(lambda relabel, asked=asked: asked.append(relabel) or labels))
        assert len(asked) == (step in (0, 2))
        walk(optimizer, parameters, gradients(step), rate=rate, decay=0.5)
        for name, x in expected.items():
            m[name] = 0.8 * m[name] + 0.2 * gradients(step)[name].numpy()
            update = np.clip(m[name] / np.maximum(0.05 * h[name], 1e-6), -1, 1)
            expected[name] = x - rate * (update + (0.5 if x.ndim > 1 else 0.0) * x)
    assert_same({name: p.detach().numpy() for name, p in parameters.items()}, expected)


def test_sophia_estimates_the_gauss_newton_diagonal() -> None:
    """The mean of many samples equals the known Hessian of a linear layer with softmax."""
    torch.manual_seed(0)
    x, weight = torch.randn(6, 3), torch.nn.Parameter(torch.randn(4, 3))
    optimizer = make("sophia_g", {"weight": weight}, beta2=0.999)
    for _ in range(800):
        logits = x @ weight.T
        labels = torch.distributions.Categorical(logits=logits).sample()
        weight.grad = None
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.update_hessian(len(x))
    p = (x @ weight.T).softmax(-1).detach()
    expected = torch.einsum("bk,bd->kd", p * (1 - p), x**2) / len(x)
    hessian = optimizer.state[weight]["hessian"] / (1 - 0.999**800)
    assert (hessian - expected).norm() < 0.2 * expected.norm()
