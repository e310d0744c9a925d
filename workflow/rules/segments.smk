# Runs that are longer than a job may be: where the jobs of a chain end, and what each leaves.
#
# A job of a chain is named by the step that it ends at: train.500.json. Its checkpoint lies in the
# run's folder and is no output to Snakemake, which removes outputs before it does a job again.


wildcard_constraints:
    segment=r"(\.[1-9]\d*)?",


def segments(name):
    """Steps at which the jobs of a run end, but for the last one; most runs are one job.

    Those that training is past, with no checkpoint left to end at, are no ends any more.
    """
    run, folder = RUNS[name], Path(f"results/{name}/training")
    if not run.train.segment_steps:
        return []
    continued = run.model.checkpoint and run.train.finetune is False
    try:
        begun = open_any(run.model.checkpoint).progress.iteration if continued else 0
    except UserError as error:
        sys.exit(f"tokamake: model.checkpoint: {error}")
    latest = folder / "latest"
    step = latest.read_text().strip().removeprefix("global_step") if latest.is_file() else ""
    past = int(step) if step.isdecimal() else 0
    return [
        end
        for end in run.train.segments(begun)
        if end > past or (folder / f"global_step{end}").is_dir()
    ]


SEGMENTS = {name: segments(name) for name in RUNS}


def segment_before(wildcards):
    """What the job before in the chain leaves; a job takes what its controller saw to."""
    end = int(wildcards.segment[1:] or sys.maxsize)
    before = [step for step in SEGMENTS[wildcards.run] if step < end]
    found = [f"results/{wildcards.run}/train.{step}.json" for step in before[-1:]]
    return [path for path in found if workflow.is_main_process or Path(path).exists()]


def evaluated(wildcards):
    """Folder of the model that is evaluated: the exported one, or a segment's checkpoint."""
    run = RUN.format(run=wildcards.run)
    step = wildcards.segment[1:]
    return f"{run}/training/global_step{step}" if step else f"{run}/export"


def evaluated_inputs(wildcards):
    """What says that it is there."""
    return f"{RUN}/train{{segment}}.json" if wildcards.segment else f"{RUN}/export"
