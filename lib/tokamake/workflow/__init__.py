"""The Python of the workflow: checks of its config, input functions, targets.

The files of `workflow/` declare rules and call these functions. `snakemake_internals` is the only
module that touches private names of Snakemake.
"""
