"""tokamake turns raw text into a trained language model, one Snakemake rule at a time.

Data comes in as raw documents (`tokamake.data`), becomes tokens, indexes and a mixture,
feeds the trainer (`tokamake.train`) and leaves as a checkpoint (`tokamake.checkpoint`).
"""

from importlib.metadata import version

__version__ = version("tokamake")
