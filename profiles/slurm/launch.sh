#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this job.
set -euo pipefail
nodes=$1 tasks=$2
shift 2
# Load your site's modules here.
. "$(dirname "$0")/meet.sh"
. "$(dirname "$0")/container.sh"
# srun does not inherit --cpus-per-task from the batch job.
exec srun --nodes "$nodes" --ntasks "$tasks" --kill-on-bad-exit=1 \
    ${TOKAMAKE_HOSTFILE:+--nodelist="$TOKAMAKE_HOSTFILE"} \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    "${pyxis[@]}" "${container[@]}" "$@"
