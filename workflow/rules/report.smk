# The page about the runs.


rule report:
    "Write report.html, a page about the runs that share the data."
    input:
        expand(f"{RUN}/run.yaml", run=CONFIG.all_runs),
        report_rules.results,
        report_rules.segment_scores,
        checkpoint_rules.exported,
    output:
        report(f"{DATA_SET.shared}/report.html", category="Results"),
    log:
        f"{DATA_SET.logs}/report.log",
    benchmark:
        f"{DATA_SET.benchmarks}/report.tsv"
    conda:
        ENVIRONMENT
    params:
        results=subpath(input[0], ancestor=2),
        data_set=DATA_SET.name,
    shell:
        "tokamake report {params.results:q} --data-set {params.data_set:q} --output {output:q}"
        " > {log:q} 2>&1"
