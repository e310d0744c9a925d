#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this PBS job.
set -euo pipefail
nodes=$1 tasks=$2
shift 2
: "${PBS_NODEFILE:?profiles/polaris runs inside a PBS job; see the head of its profile.yaml}"
if [ $((tasks % nodes)) -ne 0 ]; then
    echo "profiles/polaris: $tasks tasks do not share out evenly over $nodes nodes; change one" >&2
    exit 2
fi
ranks_per_node=$((tasks / nodes))

exec mpiexec --envall --line-buffer --np="$tasks" --ppn="$ranks_per_node" \
    --hostfile="$PBS_NODEFILE" --cpu-bind=depth --depth=8 "$@"
