# Figures and tables of the runs, and Snakemake's report around them.

from tokamake.workflow.report import (
    ENCODER_FIGURES,
    FIGURES,
    figure_rules,
    plotted_encoders,
    plotted_runs,
)

PLOTTED = plotted_runs(CONFIG)
ENCODERS = plotted_encoders(CONFIG)


rule plot:
    "Draw the run's curves and tables."
    input:
        metadata=DATA_SET.metadata,
        index=f"{RUN}/index/index.json",
        run=f"{RUN}/run.yaml",
        train=f"{RUN}/train.json",
        evaluation=f"{RUN}/evaluate.json",
        earlier=segments.evaluations,
        tasks=task_rules.scores,
        samples=f"{RUN}/samples.json",
    output:
        figure_outputs(FIGURES),
    log:
        "logs/{run}/plot.log",
    benchmark:
        "results/benchmarks/{run}/plot.tsv"
    wildcard_constraints:
        run="|".join(map(re.escape, PLOTTED)) or "(?!)",
    conda:
        ENVIRONMENT
    params:
        earlier=lambda wildcards, input: [f"--earlier={path}" for path in input.earlier],
        tasks=lambda wildcards, input: [f"--tasks={path}" for path in input.tasks],
        run=subpath(input.train, parent=True),
        index=subpath(input.index, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake plot --metadata {input.metadata:q} --index {params.index:q}"
        " --metrics {params.run:q}/training/metrics.jsonl --train {input.train:q}"
        " --evaluation {input.evaluation:q} {params.earlier:q} {params.tasks:q} --samples {input.samples:q} --config {input.run:q}"
        " --output {params.folder:q} > {log:q} 2>&1"


if ENCODERS:

    rule plot_encoder:
        "Draw the curves and tables of an encoder, which is not evaluated as it predicts no next token."
        input:
            metadata=DATA_SET.metadata,
            index=f"{RUN}/index/index.json",
            run=f"{RUN}/run.yaml",
            train=f"{RUN}/train.json",
        output:
            figure_outputs(ENCODER_FIGURES),
        log:
            "logs/{run}/plot_encoder.log",
        benchmark:
            "results/benchmarks/{run}/plot_encoder.tsv"
        wildcard_constraints:
            run="|".join(map(re.escape, ENCODERS)),
        conda:
            ENVIRONMENT
        params:
            run=subpath(input.train, parent=True),
            index=subpath(input.index, parent=True),
            folder=subpath(output[0], parent=True),
        shell:
            "tokamake plot --metadata {input.metadata:q} --index {params.index:q}"
            " --metrics {params.run:q}/training/metrics.jsonl --train {input.train:q}"
            " --config {input.run:q} --output {params.folder:q} > {log:q} 2>&1"


rule compare:
    "Compare the settings and the results of all runs of the table."
    input:
        runs=expand(f"{RUN}/run.yaml", run=PLOTTED),
        indexes=expand(f"{RUN}/index/index.json", run=PLOTTED),
        trained=expand(f"{RUN}/train.json", run=PLOTTED),
        evaluations=expand(f"{RUN}/evaluate.json", run=PLOTTED),
    output:
        report(
            f"{DATA_SET.shared}/compare/runs.html", category="Runs", caption="../report/runs.rst"
        ),
        report(
            f"{DATA_SET.shared}/compare/losses.svg",
            category="Runs",
            caption="../report/losses.rst",
        ),
    log:
        f"{DATA_SET.logs}/compare.log",
    benchmark:
        f"{DATA_SET.benchmarks}/compare.tsv"
    conda:
        ENVIRONMENT
    params:
        runs=[f"results/{run}" for run in PLOTTED],
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake compare {params.runs:q} --output {params.folder:q} > {log:q} 2>&1"


rule report:
    "Gather all runs' figures, tables, the DAG and run times in report.html."
    input:
        expand(rules.plot.output, run=PLOTTED),
        expand(rules.plot_encoder.output, run=ENCODERS) if ENCODERS else [],
        checkpoint_rules.exported,
        rules.compare.output if len(PLOTTED) > 1 else [],
        (
            expand(rules.plot_finetuned.output, run=finetune_rules.names)
            if finetune_rules.names
            else []
        ),
        expand(rules.plot_detoxified.output, run=CONFIG.runs) if CONFIG.shared.detoxify else [],
        (lambda wildcards: retrieval_rules.products) if CONFIG.shared.retrieval else [],
    output:
        html=f"{DATA_SET.shared}/report.html",
        config=f"{DATA_SET.shared}/config.json",
    log:
        f"{DATA_SET.logs}/report.log",
    benchmark:
        f"{DATA_SET.benchmarks}/report.tsv"
    conda:
        ENVIRONMENT
    params:
        config=report_rules.config_text,
        # A function, since its folder may have braces. A function of the output is not among the
        # params that make the report again when they change, as when the repository moves.
        snakefile=lambda wildcards, output: SNAKEMAKE.main_snakefile,
        shown=[SNAKEMAKE.renamed(name) for name in figure_rules(CONFIG)],
        # The profile's ranks decide `global_batch_size: null`, and this Snakemake has no profile.
        ranks=lambda wildcards, output: report_rules.ranks_options,
    shell:
        "{{ printf '%s\\n' {params.config:q} > {output.config:q}"
        " && snakemake --snakefile {params.snakefile:q} --configfile {output.config:q} --nolock"
        " {params.ranks:q}"
        " --report {output.html:q} -- {params.shown:q}; }} > {log:q} 2>&1"
