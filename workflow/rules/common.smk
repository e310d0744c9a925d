# What the rules share: the checked config, input functions and options, wildcards.

import json
import re
import shlex
import sys
from pathlib import Path

from tokamake.config.training import INDEX_SETTINGS
from tokamake.data.corpus.plan_file import write_plan
from tokamake.workflow.checkpoints import CheckpointRules
from tokamake.workflow.config import read_workflow_config
from tokamake.workflow.data import DataRules
from tokamake.workflow.doctor import DoctorRules
from tokamake.workflow.exit import exit_with
from tokamake.workflow.layouts import Layouts
from tokamake.workflow.options import RunSettings, options
from tokamake.workflow.paths import DATA, DOCTOR, HF_FILES, METADATA, PLAN, RUN, WEIGHTS
from tokamake.workflow.paths import batch_file, check_writable, split_weights
from tokamake.workflow.segments import Segments
from tokamake.workflow.snakemake_internals import Snakemake, resolve_launch, resolve_precommand

# Jobs find the commands of the environment that runs Snakemake, activated or not.
# Snakemake leaves out its strict mode where a prefix is set.
shell.prefix(f'set -euo pipefail; PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"; ')

SNAKEMAKE = Snakemake(workflow)
REPOSITORY = Path(workflow.current_basedir).parents[1]
resolve_launch(SNAKEMAKE, REPOSITORY)


def planned_segments(run):
    """The file that `plan_segments` writes for a run; Snakemake runs the rule first."""
    return checkpoints.plan_segments.get(run=run).output[0]


with exit_on_user_error():
    CONFIG = read_workflow_config(
        config,
        SNAKEMAKE.config_files or ["config/config.yaml"],
        is_main_process=SNAKEMAKE.is_main_process,
    )
    if SNAKEMAKE.is_main_process:
        check_writable([DATA, "logs", *(RUN.format(run=run) for run in CONFIG.runs)])
    run_settings = RunSettings(CONFIG)
    data_rules = DataRules(CONFIG, SNAKEMAKE.force_job if SNAKEMAKE.is_main_process else None)
    checkpoint_rules = CheckpointRules(CONFIG)
    segments = Segments(CONFIG, planned_segments if SNAKEMAKE.is_main_process else None)
    doctor_rules = DoctorRules(SNAKEMAKE)
    layouts = Layouts(CONFIG, SNAKEMAKE)

if SNAKEMAKE.is_main_process:
    # Written by no job: all jobs of a run follow one plan. A dry run writes nothing.
    SNAKEMAKE.on_start(lambda: write_plan(Path(PLAN), CONFIG.plan))
    SNAKEMAKE.on_start(lambda: resolve_precommand(SNAKEMAKE, REPOSITORY))
    # Last words: what training saved is not lost.
    SNAKEMAKE.on_error(lambda: print(*segments.saved_since_start(), sep="\n", file=sys.stderr))


wildcard_constraints:
    run="|".join(map(re.escape, CONFIG.runs)),
    batch=rf"(?:{'|'.join(map(re.escape, CONFIG.corpora))})-\d+",
    corpus="|".join(map(re.escape, CONFIG.corpora)),
    segment=r"(\.[1-9]\d*)?",
    start="|".join(map(re.escape, checkpoint_rules.starts)),
    form=r"[^/]+",
