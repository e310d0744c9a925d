"""Shuffling as NumPy's legacy generator does it, bit for bit, at several times the speed.

`samples` calls it for the orders that equal megatron-core's.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake import _csrc

_MOST = 1 << 32
"""Values beyond which NumPy draws from 64 bits, and we leave it to NumPy."""


def shuffle(
    values: npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64],
    random: np.random.RandomState,
) -> None:
    """Do `random.shuffle(values)`, with the same outcome and state of `random` afterwards.

    Args:
        values: (values,) contiguous.
        random: a Mersenne twister, as `RandomState` is unless made otherwise.
    """
    if len(values) > _MOST:
        random.shuffle(values)
        return
    state: dict[str, Any] = random.get_state(legacy=False)
    twister = state["state"]
    twister["pos"] = _csrc.shuffle(values, twister["key"], twister["pos"])
    random.set_state(state)
