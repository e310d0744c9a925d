#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this PBS job.
set -euo pipefail
nodes=$1 tasks=$2
shift 2
: "${PBS_NODEFILE:?profiles/aurora runs inside a PBS job; see the head of its profile.yaml}"
if [ $((tasks % nodes)) -ne 0 ]; then
    echo "profiles/aurora: $tasks tasks do not share out evenly over $nodes nodes; change one" >&2
    exit 2
fi
ranks_per_node=$((tasks / nodes))

# Each GPU tile is a device of its own: 12 a node.
export ZE_FLAT_DEVICE_HIERARCHY=FLAT
# oneCCL under PALS, as the ALCF user guide sets it.
export CCL_PROCESS_LAUNCHER=pmix
export CCL_ATL_TRANSPORT=mpi
export CCL_KVS_MODE=mpi
# Memory registration that survives Python's allocator.
export FI_MR_CACHE_MONITOR=userfaultfd

# One list of cores a rank, close to its tile; cores 0 and 52 are left to the system.
bind=list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100

exec mpiexec --envall --line-buffer --np="$tasks" --ppn="$ranks_per_node" \
    --hostfile="$PBS_NODEFILE" --cpu-bind="$bind" "$@"
