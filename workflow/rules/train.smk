# The training run: its resolved settings, then the ranks, in one job or in a chain of them.


rule resolve:
    "Write down every setting of the training run, for `tokamake train`."
    input:
        checkpoint=start_inputs,
        architecture=stated_architecture,
        index=f"{RUN}/index/index.json",
        weights=WEIGHTS,
        tokenizer=TOKENIZER_FILES,
    output:
        f"{RUN}/run.yaml",
    log:
        "logs/{run}/resolve.log",
    benchmark:
        "results/benchmarks/{run}/resolve.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        settings=settings("train", leave_out="segment_steps"),
        seed=setting("seed"),
        checkpoint=start,
        architecture=lambda wildcards, input: [
            f"--architecture={path}" for path in input.architecture
        ],
        index=subpath(input.index, parent=True),
        data_root=subpath(input.weights, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake resolve --settings {params.settings:q} --run {wildcards.run} --seed {params.seed}"
        " --checkpoint {params.checkpoint:q} {params.architecture:q}"
        " --index {params.index} --data-root {params.data_root}"
        " --tokenizer {input.tokenizer[0]:q}"
        " --output-folder {params.folder}/training --output {output} > {log} 2>&1"


rule train:
    "Train the model on all ranks, from its start or where it was cut off, or where a segment ended."
    input:
        run=f"{RUN}/run.yaml",
        index=f"{RUN}/index/index.json",
        checkpoint=start_inputs,
        before=segment_before,
        doctor=ancient(examined(f"{RUN}/train{{segment}}.json")),
    output:
        f"{RUN}/train{{segment}}.json",
    log:
        "logs/{run}/train{segment}.log",
    benchmark:
        "results/benchmarks/{run}/train{segment}.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 2
    resources:
        nodes=1,
        tasks=1,
    params:
        end=lambda wildcards: [f"--until-step={step}" for step in [wildcards.segment[1:]] if step],
    # A signal to all processes at once must not end those that wait for ranks that save.
    shell:
        "trap : TERM INT;"
        " {resources.launch} {resources.nodes} {resources.tasks}"
        " tokamake train --config {input.run} {params.end} 2>&1 | (trap '' TERM INT; exec tee -a {log})"
