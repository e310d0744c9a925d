"""Clipping of gradients by their global norm."""


def clip_coefficient(norm: float, limit: float) -> float:
    """Factor of the gradients so that their norm is at most `limit`; 0: no limit."""
    # The same epsilon as in torch.nn.utils.clip_grad_norm_.
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0
