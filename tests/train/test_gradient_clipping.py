"""Clipping by the global norm does as torch does: small gradients stay."""

import pytest
import torch

from tokamake.train.gradient_clipping import clip_coefficient


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_gradients_are_clipped_as_torch_clips_them(scale: float) -> None:
    gradient = scale * torch.tensor([0.6, 0.8])
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 0.5).item()
    torch.testing.assert_close(clip_coefficient(norm, 0.5) * gradient, parameter.grad)
    assert clip_coefficient(norm, 0.0) == 1.0  # no limit
