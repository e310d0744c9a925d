# Sourced by the launch scripts of Slurm's profiles: where the ranks of this job meet.
#
# It is the first node, which a batch script runs on, at a port that is free there. Elsewhere (srun from
# a login node, in an allocation of one's own) tokamake itself finds a place.
first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null) || first=
first=${first%%$'\n'*}
if [ -z "${MASTER_ADDR:-}" ] && [ -n "$first" ] && [ "$first" = "${SLURMD_NODENAME:-}" ]; then
    # A node's name in Slurm need not be one that the network knows.
    if ! getent hosts "$first" >/dev/null; then
        first=$(scontrol --oneliner show node "$first" | sed 's/.* NodeAddr=\([^ ]*\) .*/\1/')
    fi
    # Modules that were loaded later may have a Python of their own, without tokamake.
    python=$(dirname "$(command -v tokamake)")/python
    [ -x "$python" ] || python=python
    MASTER_PORT=$("$python" -c 'from tokamake.runtime.process_group import free_port as p; print(p())')
    export MASTER_ADDR=$first MASTER_PORT
fi
