#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks on this machine, on a free port.
set -euo pipefail
nodes=$1 tasks=$2
shift 2
if [ "$nodes" -ne 1 ]; then
    echo "profiles/local: nodes is $nodes, this profile has one machine; use a cluster's profile" >&2
    exit 2
fi
# Each rank needs its own GPU; with fewer GPUs, all ranks use CPUs.
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU || true)
if [ "$gpus" -gt 0 ] && [ "$gpus" -lt "$tasks" ] && [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
    echo "profiles/local: $tasks ranks, $gpus GPU: on CPUs; for the GPU, --set-resources train:tasks=$gpus" >&2
    export CUDA_VISIBLE_DEVICES=
fi
# Ranks share the threads of the job, which Snakemake sets, or the machine's cores.
threads=${OMP_NUM_THREADS:-$(nproc)}
export OMP_NUM_THREADS=$((threads > tasks ? threads / tasks : 1))
if [ "$tasks" -eq 1 ]; then
    exec "$@" # alone, a rank needs no launcher, which takes seconds to start
fi
exec python "$(dirname "$0")/ranks.py" "$tasks" "$@"
