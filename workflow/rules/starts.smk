# Which checkpoints runs start from; those with the same share its conversion.

HF_FILES = ("config.json", "model.safetensors")


def start_of(run):
    """Name and folder of the checkpoint that a run starts from; runs with the same share it."""
    if (checkpoint := RUNS[run].model.checkpoint) is None:
        return f"{run}-init", f"results/{run}/init"
    path = os.path.normpath(checkpoint)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).name)
    return f"{name}-{files.digest(path)[:8]}", str(checkpoint)


def files_of(run):
    """Files of the checkpoint that a run starts from."""
    if (checkpoint := RUNS[run].model.checkpoint) is None:
        return [f"results/{run}/init/{file}" for file in HF_FILES]
    return list(map(str, list_files(checkpoint)))


START_OF = {run: start_of(run)[0] for run in RUNS}
STARTS = dict(map(start_of, RUNS))
START_FILES = {START_OF[run]: files_of(run) for run in RUNS}
OWN = {name for name, folder in STARTS.items() if find_native(Path(folder))}
IMPORTED = [f"results/import/{name}" for name in STARTS if name not in OWN]


def start(wildcards):
    """Folder of tokamake's own checkpoint to start from; one of its own is read where it is."""
    name = START_OF[wildcards.run]
    return STARTS[name] if name in OWN else f"results/import/{name}"


def start_inputs(wildcards):
    """The same, as the files that it is made of."""
    name = START_OF[wildcards.run]
    return START_FILES[name] if name in OWN else start(wildcards)
