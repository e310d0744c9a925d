# Targets that users ask for, and personal values that the profile's batch system needs.

from tokamake.workflow.startup import finish

finish(SNAKEMAKE, FUNCTIONS)
