#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this Slurm job.
set -euo pipefail
nodes=$1 tasks=$2
shift 2
: "${SLURM_JOB_ID:?profiles/aws-parallelcluster runs inside a Slurm job; see its profile.yaml}"
. "$(dirname "$0")/../slurm/meet.sh"
. "$(dirname "$0")/../slurm/container.sh"

# EFA's libfabric and NCCL's plug-in for it, in the folders of AWS's installer and Deep Learning AMIs.
# Without the plug-in, NCCL uses TCP.
for folder in /opt/amazon/efa/lib64 /opt/amazon/efa/lib /opt/amazon/ofi-nccl/lib /opt/aws-ofi-nccl/lib; do
    if [ -d "$folder" ]; then
        export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
done
# Source of these settings: aws-samples/awsome-distributed-training, efa-cheatsheet.md.
if [ -d /sys/class/infiniband ] && ls /sys/class/infiniband | grep -qE '^(efa|rdmap)'; then
    export FI_PROVIDER=efa # use no other network if EFA is available
fi
export FI_EFA_FORK_SAFE=1     # Linux before 5.15 needs it for processes that fork, such as data loaders
export FI_EFA_USE_HUGE_PAGE=0 # otherwise forks run out of huge pages: "Cannot allocate memory"
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^docker,lo} # ranks meet over the instances' own network
# The plug-in sets NCCL_PROTO, NCCL_BUFFSIZE and numbers of channels for the instance.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-12}}

exec srun --nodes "$nodes" --ntasks "$tasks" --kill-on-bad-exit=1 \
    ${TOKAMAKE_HOSTFILE:+--nodelist="$TOKAMAKE_HOSTFILE"} \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    "${pyxis[@]}" "${container[@]}" "$@"
