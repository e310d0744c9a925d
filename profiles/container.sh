# Sourced by launch scripts with the command that runs a program in an image: sets `container` to that
# command and the image, or to nothing.
#
# The executors set JOB_CONTAINER, from `container` in your own file (profiles/README.md).
container=()
if [ -n "${JOB_CONTAINER:-}" ]; then
    if ! command -v "$1" >/dev/null; then
        place="environment.sh beside this script"
        [ -f "$(dirname "$0")/environment.sh" ] || place="this script"
        echo "$0: no $1 on PATH, which runs $JOB_CONTAINER; load its module in $place, or remove" \
            "\`container\` from your file" >&2
        return 2 # ends the launch script
    fi
    container=("$@" "$JOB_CONTAINER")
fi
