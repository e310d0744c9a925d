"""States of the random generators of a rank; dropout has none, see `parallel.dropout`."""

import random
from typing import Any

import numpy as np
import torch

from tokamake.runtime.device import accelerators


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """States of the generators of Python, NumPy, torch and the accelerator."""
    accelerator = [module.get_rng_state() for _, module in accelerators()]
    return {
        "random_rng_state": random.getstate(),
        # A list can be read without unpickling code, an array cannot.
        "np_rng_state": [
            part.tolist() if isinstance(part, np.ndarray) else part
            for part in np.random.get_state()
        ],
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": accelerator[0] if accelerator else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state`."""
    random.setstate(state["random_rng_state"])
    np.random.set_state(tuple(state["np_rng_state"]))
    torch.set_rng_state(state["torch_rng_state"])
    for _, module in accelerators():
        if state["cuda_rng_state"] is not None:
            module.set_rng_state(state["cuda_rng_state"])
