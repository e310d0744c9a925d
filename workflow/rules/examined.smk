# What training has to do with the doctor.

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
