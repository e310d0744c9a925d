# Figures and tables of the runs, and Snakemake's report around them.

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

FIGURE_RULES = ["plot", "compare"] if len(CONFIG.runs) > 1 else ["plot"]


rule plot:
    "Draw the run's curves and tables."
    input:
        metadata=METADATA,
        index=f"{RUN}/index/index.json",
        run=f"{RUN}/run.yaml",
        train=f"{RUN}/train.json",
        evaluation=f"{RUN}/evaluate.json",
        earlier=segments.evaluations,
        samples=f"{RUN}/samples.json",
    output:
        [
            report(
                f"{RUN}/plots/{name}",
                category=category,
                caption=f"../report/{Path(name).stem}.rst",
                labels={"run": "{run}", "shows": Path(name).stem.replace("_", " ")},
            )
            for name, category in FIGURES.items()
        ],
    log:
        "logs/{run}/plot.log",
    benchmark:
        "results/benchmarks/{run}/plot.tsv"
    params:
        earlier=lambda wildcards, input: [f"--earlier={path}" for path in input.earlier],
        run=subpath(input.train, parent=True),
        index=subpath(input.index, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake plot --metadata {input.metadata} --index {params.index}"
        " --metrics {params.run}/training/metrics.jsonl --train {input.train}"
        " --evaluation {input.evaluation} {params.earlier} --samples {input.samples} --config {input.run}"
        " --output {params.folder} > {log} 2>&1"


rule compare:
    "Compare the settings and the results of all runs of the table."
    input:
        runs=expand(f"{RUN}/run.yaml", run=CONFIG.runs),
        indexes=expand(f"{RUN}/index/index.json", run=CONFIG.runs),
        trained=expand(f"{RUN}/train.json", run=CONFIG.runs),
        evaluations=expand(f"{RUN}/evaluate.json", run=CONFIG.runs),
    output:
        report("results/compare/runs.html", category="Runs", caption="../report/runs.rst"),
        report("results/compare/losses.svg", category="Runs", caption="../report/losses.rst"),
    log:
        "logs/compare.log",
    benchmark:
        "results/benchmarks/compare.tsv"
    params:
        runs=[f"results/{run}" for run in CONFIG.runs],
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake compare {params.runs} --output {params.folder} > {log} 2>&1"


rule report:
    "Gather all runs' figures, tables, the DAG and run times in results/report.html."
    input:
        expand(rules.plot.output, run=CONFIG.runs),
        checkpoint_rules.exported,
        rules.compare.output if len(CONFIG.runs) > 1 else [],
    output:
        html="results/report.html",
        config="results/config.json",
    log:
        "logs/report.log",
    benchmark:
        "results/benchmarks/report.tsv"
    params:
        # The whole config, so that Snakemake reads the same workflow again, whatever its arguments were.
        config=lambda wildcards: json.dumps(SNAKEMAKE.main_config, sort_keys=True),
        snakefile=lambda wildcards: workflow.main_snakefile,  # its folder may have braces
        shown=[SNAKEMAKE.renamed(name) for name in FIGURE_RULES],
    shell:
        "{{ printf '%s\\n' {params.config:q} > {output.config}"
        " && snakemake --snakefile {params.snakefile:q} --configfile {output.config} --nolock"
        " --report {output.html} -- {params.shown}; }} > {log} 2>&1"
