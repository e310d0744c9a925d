"""What a layer keeps of each token for its backward pass; families say how much of what."""

from typing import NamedTuple


class SavedActivations(NamedTuple):
    """Bytes per token that a layer keeps, by who shares them.

    Korthikanti et al. 2022, arXiv 2205.05198, section 4, but as torch keeps them here: no dropout
    masks, and of attention only queries, keys, values and results, for SDPA computes scores again.
    """

    states: int
    """Shared where sequence parallelism is: inputs of norms."""
    gathered: int
    """Shared by none: inputs of column-parallel layers."""
    cut: int
    """Shared by tensor-parallel ranks: heads, width of the MLP."""
    products: int
    """Of `cut`, what matrix products and attention give: all that selective recomputation keeps."""
