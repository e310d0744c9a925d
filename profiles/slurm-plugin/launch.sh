#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this job.
set -euo pipefail
# The plug-in removes Slurm's variables from its jobs, except for the id. Read them from the job again.
job=$(scontrol --oneliner show job "$SLURM_JOB_ID")
field() { # NAME
    sed -n "s|.* $1=\([^ ]*\).*|\1|p" <<<"$job"
}
SLURM_JOB_NODELIST=$(field NodeList)
SLURM_CPUS_PER_TASK=$(field CPUs/Task)
SLURM_JOB_END_TIME=$(date --date "$(field EndTime)" +%s) # ranks save and stop before it
export SLURM_JOB_NODELIST SLURM_CPUS_PER_TASK SLURM_JOB_END_TIME
exec "$(dirname "$0")/../slurm/launch.sh" "$@"
