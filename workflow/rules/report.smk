# Figures and tables of the run, then Snakemake's own report around them.

FIGURES = {
    "summary.html": "Run",
    "loss.svg": "Training",
    "learning_rate.svg": "Training",
    "throughput.svg": "Training",
    "corpora.html": "Data",
    "mixture.svg": "Data",
    "lengths.svg": "Data",
    "evaluation.html": "Model",
    "samples.html": "Model",
}


rule plot:
    "Draw the run's curves and tables."
    input:
        metadata=f"{DATA}/metadata.json",
        index=f"{RUN}/index/index.json",
        run=f"{RUN}/run.yaml",
        train=f"{RUN}/train.json",
        evaluation=f"{RUN}/evaluate.json",
        samples=f"{RUN}/samples.json",
    output:
        [
            report(
                f"{RUN}/plots/{name}",
                category=category,
                caption=f"../report/{Path(name).stem}.rst",
                labels={"shows": Path(name).stem.replace("_", " ")},
            )
            for name, category in FIGURES.items()
        ],
    log:
        f"logs/{CONFIG.run}/plot.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/plot.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        metrics=f"{RUN}/training/metrics.jsonl",
        index=subpath(input.index, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake plot --metadata {input.metadata} --index {params.index}"
        " --metrics {params.metrics} --train {input.train}"
        " --evaluation {input.evaluation} --samples {input.samples} --config {input.run}"
        " --output {params.folder} > {log} 2>&1"


rule report:
    "Gather figures, tables, the DAG and run times in results/report.html."
    input:
        rules.plot.output,
    output:
        html="results/report.html",
        config=f"{RUN}/config.json",
    log:
        f"logs/{CONFIG.run}/report.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/report.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        # The whole config, so that Snakemake reads this same workflow again whatever it was given.
        config=lambda wildcards: json.dumps(config, sort_keys=True),
        snakefile=workflow.main_snakefile,
    shell:
        "{{ printf '%s\\n' {params.config:q} > {output.config}"
        " && snakemake --snakefile {params.snakefile:q} --configfile {output.config} --nolock"
        " --report {output.html} -- plot; }} > {log} 2>&1"
