# Sourced by every job on Sunspot: loads the module on which tokamake is installed, as on Aurora
# (profiles/aurora/environment.sh). Without the command `module`, this does nothing.
if type module >/dev/null 2>&1; then
    module load frameworks
fi
