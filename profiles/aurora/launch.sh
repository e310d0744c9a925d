#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this PBS job.
. "$(dirname "$0")/environment.sh" # first: modules fail under the options below
set -euo pipefail
nodes=$1 tasks=$2
shift 2
: "${PBS_NODEFILE:?launch.sh runs inside a PBS job; see the head of its profile.yaml}"
if [ $((tasks % nodes)) -ne 0 ]; then
    echo "launch.sh: $tasks tasks cannot be divided evenly among $nodes nodes; change one" >&2
    exit 2
fi
ranks_per_node=$((tasks / nodes))
. "$(dirname "$0")/mpiexec.sh"
. "$(dirname "$0")/../container.sh" apptainer exec --bind "$PWD"

# Each GPU tile is a device: 12 per node (saforem2/ezpz, bin/utils.sh).
export ZE_FLAT_DEVICE_HIERARCHY=FLAT
# oneCCL, the minimal settings of the ALCF user guide (Aurora, oneCCL):
export CCL_PROCESS_LAUNCHER=pmix # PALS gives ranks their numbers through PMIx
export CCL_ATL_TRANSPORT=mpi     # communicate between nodes through MPI, not directly through OFI
export CCL_KVS_MODE=mpi          # ranks meet through MPI, so no port has to be free
# libfabric's registrations stay valid when Python frees memory (same source).
export FI_MR_CACHE_MONITOR=userfaultfd
# As many threads as cores are bound below.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

# A list of cores per rank, close to its tile; cores 0 and 52 are reserved for the system
# (saforem2/ezpz, src/ezpz/pbs.py).
bind=list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100

exec "$mpiexec" --envall --line-buffer --np="$tasks" --ppn="$ranks_per_node" \
    --hostfile="${TOKAMAKE_HOSTFILE:-$PBS_NODEFILE}" --cpu-bind="$bind" "${container[@]}" "$@"
