# Runs that are longer than a job may be: where the jobs of a chain end, and what each leaves.
#
# A job of a chain is named by the step that it ends at: train.500.json. Its checkpoint lies in the
# run's folder and is no output to Snakemake, which removes outputs before it does a job again.
# Where epochs say how long a run is, its chain is known only once its data are, which Snakemake
# calls a checkpoint, too: it goes on with the chain when `plan_segments` is done.


wildcard_constraints:
    segment=r"(\.[1-9]\d*)?",


OPEN_ENDED = [n for n in RUNS if RUNS[n].train.segment_steps and RUNS[n].train.num_steps is None]


def known_segments(name):
    """Steps at which the jobs of a run end, but for the last one, as far as the config tells them."""
    run = RUNS[name]
    continued = run.train.segment_steps and run.model.checkpoint and run.train.finetune is False
    try:
        begun = open_any(run.model.checkpoint).progress.iteration if continued else 0
    except UserError as error:
        sys.exit(f"tokamake: model.checkpoint: {error}")
    return run.train.segments(begun)


def trained_steps(folder):
    """The step at which training goes on."""
    latest = folder / "latest"
    step = latest.read_text().strip().removeprefix("global_step") if latest.is_file() else ""
    return int(step) if step.isdecimal() else 0


KNOWN_SEGMENTS = {name: known_segments(name) for name in RUNS}
TRAINED_STEPS = {name: trained_steps(Path(f"results/{name}/training")) for name in RUNS}


def planned_segments(name):
    """The same of a run whose epochs decide; jobs take what their controller saw to."""
    path = f"results/{name}/segments.json"
    if workflow.is_main_process:
        path = checkpoints.plan_segments.get(run=name).output[0]
    return json.loads(Path(path).read_text())["segments"] if Path(path).exists() else []


def segments(name):
    """Steps at which the jobs of a run end, but for the last one; most runs are one job.

    Those that training is past, with no checkpoint left to end at, are no ends any more.
    """
    ends = planned_segments(name) if name in OPEN_ENDED else KNOWN_SEGMENTS[name]
    return [
        end
        for end in ends
        if end > TRAINED_STEPS[name] or Path(f"results/{name}/training/global_step{end}").is_dir()
    ]


def segment_before(wildcards):
    """What the job before in the chain leaves; a job takes what its controller saw to."""
    end = int(wildcards.segment[1:] or sys.maxsize)
    before = [step for step in segments(wildcards.run) if step < end]
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


checkpoint plan_segments:
    "Plan the chain of a run that is as long as the epochs of its corpora."
    input:
        f"{RUN}/run.yaml",
    output:
        f"{RUN}/segments.json",
    log:
        "logs/{run}/plan_segments.log",
    benchmark:
        "results/benchmarks/{run}/plan_segments.tsv"
    wildcard_constraints:
        run="|".join(OPEN_ENDED) or "(?!)",
    # It takes no time, and all that follows waits for it.
    localrule: True
    conda:
        "../envs/tokamake.yaml"
    params:
        steps=setting("train.segment_steps"),
    shell:
        "tokamake plan-segments --config {input} --segment-steps {params.steps} --output {output}"
        " > {log} 2>&1"


onerror:
    # The last words: what training did is not lost.
    for name, before in TRAINED_STEPS.items() if workflow.is_main_process else ():
        step = trained_steps(Path(f"results/{name}/training"))
        if step > before and step != RUNS[name].train.num_steps:
            print(
                f"tokamake: run {name} is saved at step {step:,}; run the same command again to go on",
                file=sys.stderr,
            )
