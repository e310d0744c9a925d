# Sourced by launch scripts of Slurm: sets `pyxis` to options of srun and `container` to the start of the
# command with which ranks run in the image JOB_CONTAINER; without an image, both are empty.
pyxis=() container=()
case ${JOB_CONTAINER:-} in
"") ;;
*.sif) # --nv shows NVIDIA's GPUs to the image; where there are none, it only prints a warning
    . "$(dirname "$0")/../container.sh" apptainer exec --nv --bind "$PWD" ;;
*) # needs the plug-in pyxis of Slurm (NVIDIA/pyxis)
    pyxis=(--container-image="$JOB_CONTAINER" --container-mounts="$PWD:$PWD"
        --container-workdir="$PWD" --container-mount-home) ;;
esac
