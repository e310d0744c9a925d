# The training run: its resolved settings, then the ranks.


rule resolve:
    "Write down every setting of the training run, for `tokamake train`."
    input:
        checkpoint=f"{RUN}/import/latest",
        index=f"{RUN}/index/index.json",
    output:
        f"{RUN}/run.yaml",
    log:
        "logs/resolve.log",
    benchmark:
        "results/benchmarks/resolve.tsv"
    params:
        settings=settings("train"),
        seed=CONFIG.seed,
    shell:
        "tokamake resolve --settings {params.settings:q} --run {CONFIG.run} --seed {params.seed}"
        " --checkpoint {RUN}/import --index {RUN}/index --data-root {DATA}"
        " --output-folder {RUN}/training --output {output} > {log} 2>&1"


rule train:
    "Train the model on all ranks, from the imported checkpoint or where it was cut off."
    input:
        run=f"{RUN}/run.yaml",
        index=f"{RUN}/index/index.json",
        checkpoint=f"{RUN}/import/latest",
    output:
        f"{RUN}/train.json",
    log:
        "logs/train.log",
    benchmark:
        "results/benchmarks/train.tsv"
    threads: 2
    resources:
        nodes=1,
        tasks=1,
    shell:
        "{resources.launch} {resources.nodes} {resources.tasks}"
        " tokamake train --config {input.run} 2>&1 | tee {log}"
