# What training has to do with the doctor.

import re
from pathlib import Path

from snakemake.io import IOFile

DOCTOR = "results/doctor"


def examined_place():
    """Name of the place that the doctor sees: the profile's launch script, how many nodes and ranks."""
    given = workflow.resource_settings
    own, common = given.overwrite_resources.get("doctor", {}), given.default_resources or {}
    nodes, tasks = (own[name].raw if name in own else 1 for name in ("nodes", "tasks"))
    launch = str(common["launch"].raw).strip("'\"") if "launch" in common else ""
    name = f"{Path(launch).parent.name}-{nodes}-nodes-{tasks}-ranks"
    return re.sub(r"[^\w.-]", "-", name).lstrip("-.")


EXAMINED = f"{DOCTOR}/{examined_place()}.json"


def examined(product):
    """The doctor's report as an input, where the profile gives the rule `doctor` resources.

    Snakemake makes a product again whose input files are others than before. So one that is there
    keeps those that it was made with, whatever the profile, and jobs take what their controller saw
    to.
    """

    def report(wildcards):
        path = product.format(**dict(wildcards.items()))
        if workflow.is_main_process and Path(path).exists():
            made_with = workflow.persistence.input(IOFile(path)) or []
            return [one for one in made_with if one.startswith(DOCTOR)]
        wanted = "doctor" in workflow.resource_settings.overwrite_resources
        there = workflow.is_main_process or Path(EXAMINED).exists()
        return [EXAMINED] if wanted and there else []

    return report
