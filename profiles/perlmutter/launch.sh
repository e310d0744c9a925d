#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this Slurm job.
. "$(dirname "$0")/environment.sh" # before the options below, which modules do not bear
set -euo pipefail
nodes=$1 tasks=$2
shift 2
: "${SLURM_JOB_ID:?profiles/perlmutter runs inside a Slurm job; see the head of its profile.yaml}"
. "$(dirname "$0")/../slurm/meet.sh"

# NCCL over Slingshot goes through libfabric by a plug-in that the module pytorch brings;
# it has settings of its own. These are HPE's for it (HewlettPackard/shs-ccl-docs, ccl_env.sh).
export NCCL_SOCKET_IFNAME=hsn # ranks meet over Slingshot's interfaces, hsn0 to hsn3
export NCCL_NET_GDR_LEVEL=PHB # GPU and network card talk directly where they share a host bridge
export NCCL_CROSS_NIC=1       # rings may change the network card from node to node
export FI_CXI_DISABLE_HOST_REGISTER=1  # else CUDA's allocations can lock up with the network's
export FI_MR_CACHE_MONITOR=userfaultfd # registrations that survive Python's allocator
export FI_CXI_DEFAULT_CQ_SIZE=131072   # events in flight of many ranks
# 16 cores a rank, not its 32 hardware threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-16}

# Each rank sees all GPUs of its node and takes the one of its local rank: bound to one each, they could
# not use NVLink (NERSC documentation, Jobs, "Affinity"). Cores are bound, close to each other.
exec srun --nodes "$nodes" --ntasks "$tasks" --kill-on-bad-exit=1 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    --gpu-bind=none --cpu-bind=cores "$@"
