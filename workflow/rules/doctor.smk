# Whether ranks can work where a profile sends them, asked once before the first training.

from pathlib import Path

from snakemake.io import IOFile

DOCTOR = "results/doctor.json"


def examined(product):
    """The doctor's report as an input, where the profile gives the rule `doctor` resources.

    Snakemake makes a product again whose input files are others than before. So one that is there
    keeps those that it was made with, whatever the profile, and jobs take what their controller saw
    to.
    """

    def report(wildcards):
        path = product.format(**dict(wildcards.items()))
        if workflow.is_main_process and Path(path).exists():
            wanted = DOCTOR in (workflow.persistence.input(IOFile(path)) or [])
        else:
            wanted = "doctor" in workflow.resource_settings.overwrite_resources
        there = workflow.is_main_process or Path(DOCTOR).exists()
        return [DOCTOR] if wanted and there else []

    return report


rule doctor:
    "Have all ranks meet, compare their hosts and measure how they talk to each other."
    output:
        DOCTOR,
    log:
        "logs/doctor.log",
    benchmark:
        "results/benchmarks/doctor.tsv"
    priority: 100
    retries: 0  # whatever the profile has for others: its words are wanted at once
    conda:
        "../envs/tokamake.yaml"
    resources:
        nodes=1,
        tasks=1,
    shell:
        "{resources.launch} {resources.nodes} {resources.tasks}"
        " tokamake doctor --ranks --output {output} > {log} 2>&1"
