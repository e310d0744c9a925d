"""tokamake turns raw text into a trained language model, one Snakemake rule at a time.

Data comes in as raw documents (`tokamake.data`), becomes tokens, indexes and a mixture,
feeds the trainer (`tokamake.train`) and leaves as a checkpoint (`tokamake.checkpoint`).
"""


def __getattr__(name: str) -> str:
    """`__version__`, looked up when asked for: importing what finds it takes as long as a job's
    smallest step."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("tokamake")
