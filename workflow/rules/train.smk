# The training run: its resolved settings, then the ranks, in one job or in a chain of them.


checkpoint plan_segments:
    "Plan the chain of jobs of a run whose length the epochs of its corpora decide."
    input:
        f"{RUN}/run.yaml",
    output:
        f"{RUN}/segments.json",
    log:
        "logs/{run}/plan_segments.log",
    benchmark:
        "results/benchmarks/{run}/plan_segments.tsv"
    wildcard_constraints:
        run="|".join(segments.open_ended) or "(?!)",
    localrule: True  # it takes no time, and all that follows waits for it
    conda:
        ENVIRONMENT
    params:
        steps=run_settings.value("train.segment_steps"),
    shell:
        "tokamake plan-segments --config {input:q} --segment-steps {params.steps:q} --output {output:q}"
        " > {log:q} 2>&1"


rule resolve:
    "Write every setting of the run to run.yaml, for `tokamake train`."
    input:
        checkpoint=checkpoint_rules.start_inputs,
        architecture=checkpoint_rules.stated_architecture,
        index=f"{RUN}/index/index.json",
        weights=WEIGHTS,
        tokenizer=CONFIG.run_tokenizer_files,
    output:
        f"{RUN}/run.yaml",
    log:
        "logs/{run}/resolve.log",
    benchmark:
        "results/benchmarks/{run}/resolve.tsv"
    conda:
        ENVIRONMENT
    params:
        settings=run_settings.section("train", leave_out=("on_change", "segment_steps")),
        seed=run_settings.value("seed"),
        checkpoint=checkpoint_rules.start_options,
        architecture=checkpoint_rules.model_options,
        index=subpath(input.index, parent=True),
        data_root=subpath(input.weights, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake resolve --settings {params.settings:q} --run {wildcards.run:q} --seed {params.seed:q}"
        " {params.checkpoint:q} {params.architecture:q}"
        " --index {params.index:q} --data-root {params.data_root:q}"
        " --tokenizer {input.tokenizer[0]:q}"
        " --output-folder {params.folder:q}/training --output {output:q} > {log:q} 2>&1"


rule train:
    "Train the model on all ranks: from the beginning, the last checkpoint or the last segment."
    input:
        run=f"{RUN}/run.yaml",
        index=f"{RUN}/index/index.json",
        checkpoint=checkpoint_rules.start_inputs,
        neighbors=retro_rules.neighbors,
        before=segments.before,
        doctor=doctor_rules.report_for(f"{RUN}/train{{segment}}.json"),
    output:
        f"{RUN}/train{{segment}}.json",
    log:
        "logs/{run}/train{segment}.log",
    benchmark:
        "results/benchmarks/{run}/train{segment}.tsv"
    conda:
        ENVIRONMENT
    threads: 2
    resources:
        nodes=1,
        tasks=1,
        restarts=3,
        spare_nodes=0,  # more nodes for the job; restarts use them in place of lost ones
    params:
        checked=preflight.train,
        end=segments.end_option,
    # A signal goes to all processes at once. It must not end the shell while ranks save.
    # Snakemake removes the log before a job. A second link keeps what earlier jobs of the run wrote.
    shell:
        "trap : TERM INT USR1;"
        ' kept=$(dirname {log:q})/.$(basename {log:q}); touch "$kept";'
        ' ln -f "$kept" {log:q} || ln -s "$(basename "$kept")" {log:q};'
        " python -m tokamake.runtime.restarts {resources.restarts} results/{wildcards.run:q}/training"
        " {resources.launch} {resources.nodes} {resources.tasks}"
        " tokamake train --config {input.run:q} {params.end:q} 2>&1 | (trap '' TERM INT USR1; exec tee -a {log:q})"
