#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this PBS job.
. "$(dirname "$0")/environment.sh" # first: modules fail under the options below
set -euo pipefail
nodes=$1 tasks=$2
shift 2
: "${PBS_NODEFILE:?profiles/polaris runs inside a PBS job; see the head of its profile.yaml}"
if [ $((tasks % nodes)) -ne 0 ]; then
    echo "profiles/polaris: $tasks tasks cannot be divided evenly among $nodes nodes; change one" >&2
    exit 2
fi
ranks_per_node=$((tasks / nodes))
. "$(dirname "$0")/../aurora/mpiexec.sh"
. "$(dirname "$0")/../container.sh" apptainer exec --nv --bind "$PWD"

# NCCL uses Slingshot through libfabric and a plug-in of the site (ALCF user guide, Polaris, NCCL).
# Without the plug-in, NCCL uses TCP; if NCCL_NET is set, it stops instead. An image does not have this
# folder, but maybe a plug-in of its own.
plugin=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib
if [ -z "${JOB_CONTAINER:-}" ] && [ -d "$plugin" ]; then
    export LD_LIBRARY_PATH=$plugin:/soft/libraries/hwloc/lib:${LD_LIBRARY_PATH-}
    export NCCL_NET="AWS Libfabric"
fi
export NCCL_NET_GDR_LEVEL=PHB # GPUs and network cards on the same host bridge communicate directly
export NCCL_CROSS_NIC=1       # rings may use different network cards on different nodes
# Not the guide's NCCL_COLLNET_ENABLE: the same page reports hangs of Megatron-DeepSpeed.
# libfabric on Slingshot (same source):
export FI_CXI_DISABLE_HOST_REGISTER=1  # otherwise allocations of CUDA and the network can deadlock
export FI_MR_CACHE_MONITOR=userfaultfd # registrations stay valid when Python frees memory
export FI_CXI_DEFAULT_CQ_SIZE=131072   # room for the completion events of many ranks
# As many threads as cores are bound below.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

# 8 of 32 cores per rank (saforem2/ezpz, src/ezpz/pbs.py).
exec "$mpiexec" --envall --line-buffer --np="$tasks" --ppn="$ranks_per_node" \
    --hostfile="${TOKAMAKE_HOSTFILE:-$PBS_NODEFILE}" --cpu-bind=depth --depth=8 "${container[@]}" "$@"
