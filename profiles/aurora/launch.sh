#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this PBS job.
. "$(dirname "$0")/environment.sh" # before the options below, which modules do not bear
set -euo pipefail
nodes=$1 tasks=$2
shift 2
: "${PBS_NODEFILE:?launch.sh runs inside a PBS job; see the head of its profile.yaml}"
if [ $((tasks % nodes)) -ne 0 ]; then
    echo "launch.sh: $tasks tasks do not share out evenly over $nodes nodes; change one" >&2
    exit 2
fi
ranks_per_node=$((tasks / nodes))
. "$(dirname "$0")/mpiexec.sh"

# Each GPU tile is a device of its own: 12 a node (saforem2/ezpz, bin/utils.sh).
export ZE_FLAT_DEVICE_HIERARCHY=FLAT
# oneCCL, the minimal set of the ALCF user guide (Aurora, oneCCL):
export CCL_PROCESS_LAUNCHER=pmix # ranks are told by PALS through PMIx
export CCL_ATL_TRANSPORT=mpi     # between nodes through MPI, not through OFI by itself
export CCL_KVS_MODE=mpi          # ranks meet through MPI, so no port has to be free
# Memory registration of libfabric that survives Python's allocator (same place).
export FI_MR_CACHE_MONITOR=userfaultfd
# Cores of a rank, as bound below.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

# One list of cores a rank, close to its tile; cores 0 and 52 are left to the system
# (saforem2/ezpz, src/ezpz/pbs.py).
bind=list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100

exec "$mpiexec" --envall --line-buffer --np="$tasks" --ppn="$ranks_per_node" \
    --hostfile="$PBS_NODEFILE" --cpu-bind="$bind" "$@"
