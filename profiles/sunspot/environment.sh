# Sourced by every job on Sunspot: what tokamake's Python was installed on, as on Aurora
# (profiles/aurora/environment.sh). Where there are no modules, the environment stays as it is.
if type module >/dev/null 2>&1; then
    module load frameworks
fi
