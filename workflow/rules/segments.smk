# Runs that are longer than a job may be: where the jobs of a chain end, and what each leaves.
#
# A job of a chain is named by the step that it ends at: train.500.json. Its checkpoint lies in the
# run's folder and is no output to Snakemake, which removes outputs before it does a job again.


wildcard_constraints:
    segment=r"(\.[1-9]\d*)?",


def segments(run):
    """Steps at which the jobs of a run end, but for the last one; most runs are one job."""
    train = run.train
    continued = train.segment_steps and run.model.checkpoint and train.finetune is False
    return train.segments(open_any(run.model.checkpoint).progress.iteration if continued else 0)


SEGMENTS = {name: segments(run) for name, run in RUNS.items()}


def segment_before(wildcards):
    """What the job before in the chain leaves."""
    end = int(wildcards.segment[1:] or sys.maxsize)
    before = [step for step in SEGMENTS[wildcards.run] if step < end]
    return [f"{RUN}/train.{before[-1]}.json"] if before else []


def evaluated(wildcards):
    """Folder of the model that is evaluated: the exported one, or a segment's checkpoint."""
    run = RUN.format(run=wildcards.run)
    step = wildcards.segment[1:]
    return f"{run}/training/global_step{step}" if step else f"{run}/export"


def evaluated_inputs(wildcards):
    """What says that it is there."""
    return f"{RUN}/train{{segment}}.json" if wildcards.segment else f"{RUN}/export"
