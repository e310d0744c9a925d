#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this PBS job.
. "$(dirname "$0")/environment.sh" # before the options below, which modules do not bear
set -euo pipefail
nodes=$1 tasks=$2
shift 2
: "${PBS_NODEFILE:?profiles/polaris runs inside a PBS job; see the head of its profile.yaml}"
if [ $((tasks % nodes)) -ne 0 ]; then
    echo "profiles/polaris: $tasks tasks do not share out evenly over $nodes nodes; change one" >&2
    exit 2
fi
ranks_per_node=$((tasks / nodes))
. "$(dirname "$0")/../aurora/mpiexec.sh"

# NCCL over Slingshot goes through libfabric by a plug-in of the site (ALCF user guide, Polaris,
# NCCL). Without the plug-in NCCL would take TCP; with NCCL_NET it would rather stop.
plugin=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib
if [ -d "$plugin" ]; then
    export LD_LIBRARY_PATH=$plugin:/soft/libraries/hwloc/lib:${LD_LIBRARY_PATH-}
    export NCCL_NET="AWS Libfabric"
fi
export NCCL_NET_GDR_LEVEL=PHB # GPU and network card talk directly where they share a host bridge
export NCCL_CROSS_NIC=1       # rings may change the network card from node to node
# The guide's NCCL_COLLNET_ENABLE is left out: the same page reports hangs of Megatron-DeepSpeed.
# libfabric on Slingshot (same place):
export FI_CXI_DISABLE_HOST_REGISTER=1  # else CUDA's allocations can lock up with the network's
export FI_MR_CACHE_MONITOR=userfaultfd # registrations that survive Python's allocator
export FI_CXI_DEFAULT_CQ_SIZE=131072   # events in flight of many ranks
# Cores of a rank, as bound below.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

# 8 of 32 cores a rank (saforem2/ezpz, src/ezpz/pbs.py).
exec "$mpiexec" --envall --line-buffer --np="$tasks" --ppn="$ranks_per_node" \
    --hostfile="$PBS_NODEFILE" --cpu-bind=depth --depth=8 "$@"
