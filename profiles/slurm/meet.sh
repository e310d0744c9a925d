# Sourced by the launch scripts of the Slurm profiles: sets the address at which ranks meet.
#
# A batch script runs on the first node of the job; ranks meet there, at a free port. Outside batch
# scripts (srun on a login node, or in your own allocation), tokamake itself chooses the address.
# A job with spare nodes names the nodes of its ranks in a file.
if [ -n "${TOKAMAKE_HOSTFILE:-}" ]; then
    first=$(cat "$TOKAMAKE_HOSTFILE")
else
    first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null) || first=
fi
first=${first%%$'\n'*}
if [ -z "${MASTER_ADDR:-}" ] && [ -n "$first" ] && [ "$first" = "${SLURMD_NODENAME:-}" ]; then
    # The network may not know the name that a node has in Slurm.
    if ! getent hosts "$first" >/dev/null; then
        first=$(scontrol --oneliner show node "$first" | sed 's/.* NodeAddr=\([^ ]*\) .*/\1/')
    fi
    # `python` may come from a module that was loaded later, without tokamake.
    python=$(dirname "$(command -v tokamake)")/python
    [ -x "$python" ] || python=python
    MASTER_PORT=$("$python" -c 'from tokamake.runtime.process_group import free_port as p; print(p())')
    export MASTER_ADDR=$first MASTER_PORT
fi
