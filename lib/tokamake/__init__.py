"""tokamake turns raw text into a trained language model, one Snakemake rule at a time.

`tokamake.data` turns raw documents into tokens, a mixture and sample indexes. `tokamake.train`
trains a model on them. `tokamake.checkpoint` reads, writes and converts checkpoints.
"""


def __getattr__(name: str) -> str:
    """Look up `__version__` only on request: importlib.metadata is slow to import."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("tokamake")
