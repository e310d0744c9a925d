#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks on this machine, on a free port.
set -euo pipefail
nodes=$1 tasks=$2
shift 2
if [ "$nodes" -ne 1 ]; then
    echo "profiles/local: nodes is $nodes, this profile has one machine; use a cluster's profile" >&2
    exit 2
fi
exec torchrun --standalone --nproc-per-node "$tasks" --no-python "$@"
