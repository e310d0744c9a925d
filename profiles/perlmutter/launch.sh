#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this Slurm job.
. "$(dirname "$0")/environment.sh" # first: modules fail under the options below
set -euo pipefail
nodes=$1 tasks=$2
shift 2
: "${SLURM_JOB_ID:?profiles/perlmutter runs inside a Slurm job; see the head of its profile.yaml}"
. "$(dirname "$0")/../slurm/meet.sh"
# Modules of Shifter: `gpu` shows the GPUs to an image with CUDA; `nccl-plugin` brings NCCL's plug-in for
# Slingshot, without which NCCL uses TCP (NERSC documentation, Shifter).
. "$(dirname "$0")/../container.sh" shifter --module=gpu,nccl-plugin --image

# NCCL uses Slingshot through libfabric and a plug-in, which the module pytorch contains and sets up.
# HPE's settings (HewlettPackard/shs-ccl-docs, ccl_env.sh):
export NCCL_SOCKET_IFNAME=hsn # ranks meet over Slingshot's interfaces, hsn0 to hsn3
export NCCL_NET_GDR_LEVEL=PHB # GPUs and network cards on the same host bridge communicate directly
export NCCL_CROSS_NIC=1       # rings may use different network cards on different nodes
export FI_CXI_DISABLE_HOST_REGISTER=1  # otherwise allocations of CUDA and the network can deadlock
export FI_MR_CACHE_MONITOR=userfaultfd # registrations stay valid when Python frees memory
export FI_CXI_DEFAULT_CQ_SIZE=131072   # room for the completion events of many ranks
# One thread per core: 16 per rank, with 32 hardware threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-16}

# Each rank sees all GPUs of its node and uses the GPU of its local rank. Ranks bound to a single GPU
# cannot use NVLink (NERSC documentation, Jobs, "Affinity"). Ranks are bound to neighboring cores.
exec srun --nodes "$nodes" --ntasks "$tasks" --kill-on-bad-exit=1 \
    ${TOKAMAKE_HOSTFILE:+--nodelist="$TOKAMAKE_HOSTFILE"} \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    --gpu-bind=none --cpu-bind=cores "${container[@]}" "$@"
