"""The report of the rule `doctor` as an input of the first segment of training."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokamake.workflow.paths import DOCTOR
from tokamake.workflow.snakemake_internals import Snakemake, ancient


class DoctorRules:
    """The doctor's report for the nodes and ranks that the profile gives it."""

    def __init__(self, snakemake: Snakemake) -> None:
        self._snakemake = snakemake
        resources = snakemake.rule_resources("doctor")
        nodes, tasks = (resources.get(name, 1) for name in ("nodes", "tasks"))
        place = f"{Path(snakemake.launch).parent.name}-{nodes}-nodes-{tasks}-ranks"
        place = re.sub(r"[^\w.-]", "-", place).lstrip("-.")
        self.report = f"{DOCTOR}/{place}.json"
        """Path of the report: the profile's launch script, and the numbers of nodes and ranks."""

    def report_for(self, product: str) -> Callable[[Any], list[str]]:
        """The report as an input of `product`, if the profile gives the rule `doctor` resources.

        It is ancient: a new report trains nothing again. A product that exists keeps the report
        that it was made with, whatever the profile, since Snakemake reruns a job when its inputs
        change. Jobs take their controller's plan.
        """

        def inputs(wildcards: Any) -> list[str]:
            path = product.format(**dict(wildcards.items()))
            if self._snakemake.is_main_process and Path(path).exists():
                recorded = self._snakemake.recorded_inputs(path)
                return ancient([path for path in recorded if path.startswith(DOCTOR)])
            is_wanted = bool(self._snakemake.rule_resources("doctor"))
            is_planned = self._snakemake.is_main_process or Path(self.report).exists()
            return ancient([self.report]) if is_wanted and is_planned else []

        return inputs
