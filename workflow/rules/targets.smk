# Targets that users ask for, and personal values that the profile's batch system needs.

from snakemake_executor_plugin_pbs.errors import UserError as ExecutorError
from snakemake_executor_plugin_pbs.personal import missing_in_workflow
from tokamake.workflow.targets import Targets

SNAKEMAKE.expand_targets(
    Targets(CONFIG, SNAKEMAKE, checkpoint_rules, segments, doctor_rules).expand
)

# Account, queue and the like. In a dry run there is no executor to ask for them.
if SNAKEMAKE.is_main_process:
    try:
        message = missing_in_workflow(workflow)
    except ExecutorError as error:  # the user's file is wrong
        message = str(error)
    if message:
        exit_with(message)
