#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this job.
set -euo pipefail
nodes=$1 tasks=$2
shift 2
# Load your site's modules here.
. "$(dirname "$0")/meet.sh"
# srun does not inherit --cpus-per-task from the batch job.
# Images need the plug-in pyxis of Slurm (NVIDIA/pyxis).
exec srun --nodes "$nodes" --ntasks "$tasks" --kill-on-bad-exit=1 \
    ${TOKAMAKE_HOSTFILE:+--nodelist="$TOKAMAKE_HOSTFILE"} \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    ${JOB_CONTAINER:+--container-image="$JOB_CONTAINER" --container-mounts="$PWD:$PWD" --container-workdir="$PWD" --container-mount-home} \
    "$@"
