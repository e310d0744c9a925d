# The training run: its resolved settings, then the ranks.


rule resolve:
    "Write down every setting of the training run, for `tokamake train`."
    input:
        checkpoint=START_FILES,
        architecture=CONFIG.model.stated or [],
        index=f"{RUN}/index/index.json",
        weights=f"{DATA}/weights.txt",
        tokenizer=TOKENIZER_FILES,
    output:
        f"{RUN}/run.yaml",
    log:
        f"logs/{CONFIG.run}/resolve.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/resolve.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        settings=settings("train"),
        run=CONFIG.run,
        seed=CONFIG.seed,
        checkpoint=lambda wildcards: START,
        architecture=[f"--architecture={path}" for path in [CONFIG.model.stated] if path],
        index=subpath(input.index, parent=True),
        data_root=subpath(input.weights, parent=True),
        folder=f"{RUN}/training",
    shell:
        "tokamake resolve --settings {params.settings:q} --run {params.run} --seed {params.seed}"
        " --checkpoint {params.checkpoint:q} {params.architecture:q}"
        " --index {params.index} --data-root {params.data_root}"
        " --tokenizer {input.tokenizer[0]:q}"
        " --output-folder {params.folder} --output {output} > {log} 2>&1"


rule train:
    "Train the model on all ranks, from its start or where it was cut off."
    input:
        run=f"{RUN}/run.yaml",
        index=f"{RUN}/index/index.json",
        checkpoint=START_FILES,
    output:
        f"{RUN}/train.json",
    log:
        f"logs/{CONFIG.run}/train.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/train.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 2
    resources:
        nodes=1,
        tasks=1,
    # A signal to all processes at once must not end those that wait for ranks that save.
    shell:
        "trap : TERM INT;"
        " {resources.launch} {resources.nodes} {resources.tasks}"
        " tokamake train --config {input.run} 2>&1 | (trap '' TERM INT; exec tee {log})"
