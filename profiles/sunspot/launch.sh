#!/usr/bin/env bash
# launch.sh NODES TASKS COMMAND...: run COMMAND as TASKS ranks over NODES nodes of this PBS job.
# Sunspot's nodes are the same as Aurora's: tiles, cores, network and settings (saforem2/ezpz,
# src/ezpz/pbs.py, binds ranks in the same way on both).
. "$(dirname "$0")/environment.sh"
exec "$(dirname "$0")/../aurora/launch.sh" "$@"
