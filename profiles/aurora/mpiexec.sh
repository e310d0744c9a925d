# Sourced by the launch scripts, after the site's modules: sets `mpiexec` to the site's launcher.
#
# The Python environment of tokamake comes first on PATH in jobs. A package in it, such as mpich, can
# contain an mpiexec that does not know the nodes of this site.
tokamake=$(command -v tokamake) || tokamake=
real=$(readlink -f "$tokamake") || real=
in_environment() {
    local folder
    for folder in "${tokamake%/*}" "${real%/*}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin}"; do
        [ "${1%/*}" -ef "$folder" ] && return
    done
    return 1
}
mpiexec=
while read -r program; do
    if ! in_environment "$program" && ! in_environment "$(readlink -f "$program")"; then
        mpiexec=$program
        break
    fi
done < <(type -aP mpiexec)
if [ -z "$mpiexec" ]; then
    echo "$0: no mpiexec on PATH outside tokamake's Python environment;" \
        "load the module of the site's MPI in environment.sh beside this script" >&2
    return 2 # ends the launch script
fi
