# What the rules share: the checked config, input functions and options, wildcards.

import re

from tokamake.config.training import INDEX_SETTINGS
from tokamake.data.corpus.fetch_batch import ALL
from tokamake.workflow.options import options
from tokamake.config.data_set import RUN
from tokamake.workflow.paths import DOCTOR, split_weights
from tokamake.workflow.startup import add_hooks, rule_functions, shell_prefix

shell.prefix(shell_prefix(SNAKEMAKE))

FUNCTIONS = rule_functions(
    SNAKEMAKE,
    config,
    planned_segments=lambda run: checkpoints.plan_segments.get(run=run).output[0],
)
add_hooks(SNAKEMAKE, FUNCTIONS)

CONFIG = FUNCTIONS.config
run_settings = FUNCTIONS.run_settings
data_rules = FUNCTIONS.data
sample_rules = FUNCTIONS.samples
checkpoint_rules = FUNCTIONS.checkpoints
segments = FUNCTIONS.segments
task_rules = FUNCTIONS.tasks
finetune_rules = FUNCTIONS.finetune
detoxify_rules = FUNCTIONS.detoxify
retrieval_rules = FUNCTIONS.retrieval
retro_rules = FUNCTIONS.retro
doctor_rules = FUNCTIONS.doctor
preflight = FUNCTIONS.preflight
report_rules = FUNCTIONS.report

DATA_SET = CONFIG.data_set
DATA, WEIGHTS = DATA_SET.folder, DATA_SET.weights
ENVIRONMENT = SNAKEMAKE.environment


wildcard_constraints:
    run="|".join(map(re.escape, CONFIG.runs)) or "(?!)",
    batch="|".join(map(re.escape, CONFIG.batch_names)) or "(?!)",
    corpus="|".join(map(re.escape, CONFIG.corpora)) or "(?!)",
    segment=r"(\.[1-9]\d*)?",
    task="|".join(map(re.escape, task_rules.names)) or "(?!)",
    start="|".join(map(re.escape, checkpoint_rules.starts)) or "(?!)",
    form=r"[^/]+",
    scope=r"[^/]+",  # else each signed or hashed batch would match it, too
