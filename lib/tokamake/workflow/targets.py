"""Targets: the name of a rule means all runs; an unknown target is one line.

Snakemake takes no rule with wildcards as a target. Each such rule becomes the files that it makes.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from tokamake.config.data_set import RUN
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.checkpoints import CheckpointRules
from tokamake.workflow.detoxify import RULES as DETOXIFY_RULES
from tokamake.workflow.detoxify import DetoxifyRules
from tokamake.workflow.doctor import DoctorRules
from tokamake.workflow.exit import exit_with
from tokamake.workflow.finetune import RULES as FINETUNE_RULES
from tokamake.workflow.retrieval import RULES as RETRIEVAL_RULES
from tokamake.workflow.retrieval import RetrievalRules
from tokamake.workflow.retro import RULES as RETRO_RULES
from tokamake.workflow.retro import RetroRules
from tokamake.workflow.segments import SegmentRules
from tokamake.workflow.snakemake_internals import Snakemake
from tokamake.workflow.tasks import TaskRules


@dataclass(frozen=True)
class Targets:
    """Turns the targets of a user into targets that Snakemake can build."""

    config: WorkflowConfig
    snakemake: Snakemake
    checkpoints: CheckpointRules
    segments: SegmentRules
    tasks: TaskRules
    detoxify: DetoxifyRules
    retrieval: RetrievalRules
    retro: RetroRules
    doctor: DoctorRules

    def expand(self, targets: Iterable[str]) -> set[str]:
        """Replace each rule with wildcards by the files that it makes for all runs."""
        expanded: set[str] = set()
        for target in targets:
            if self.snakemake.is_rule(target):
                expanded |= set(self._outputs_for_all_runs(target) or [target])
                continue
            if self.snakemake.is_main_process:
                self._check(target)
            expanded.add(target)
        return expanded

    def _outputs_for_all_runs(self, target: str) -> list[str]:
        """Files that a rule makes for all runs; none if it has other wildcards."""
        rule = self.snakemake.original_name(target)
        if rule == "convert":
            return self.checkpoints.exported or exit_with(
                "convert: the config names no export format; list some, as in "
                "convert: [mds-tp2], or ask for one: results/RUN/convert/FORMAT"
            )
        if rule == "import_checkpoint":
            return self.checkpoints.imported or exit_with(
                "import_checkpoint: every run starts from random weights, or from a checkpoint "
                "that training reads as it is; there is nothing to convert"
            )
        if rule == "plan_segments":
            names = self.segments.open_ended
            return [f"results/{name}/segments.json" for name in names] or exit_with(
                "plan_segments: there is nothing to plan: no run has train.segment_steps "
                "and the length of its corpora's epochs"
            )
        if rule == "doctor":
            return [self.doctor.report]
        wildcards, outputs = self.snakemake.outputs(target)
        if rule in RETRIEVAL_RULES and wildcards:
            return self.retrieval.outputs_for_all_runs(rule, outputs)
        if rule in RETRO_RULES:
            return self.retro.outputs_for_all_runs(outputs)
        if "task" in wildcards:
            return self.tasks.outputs_for_all_runs(outputs)
        if "texts" in wildcards:
            return self.detoxify.outputs_before_training(outputs)
        if not {"run"} <= wildcards <= {"run", "segment"}:
            return []
        runs = self.config.finetuned if rule in FINETUNE_RULES else self.config.runs
        return [output.format(run=run, segment="") for output in outputs for run in runs]

    def _check(self, target: str) -> None:
        """Exit with one line if no rule makes a target."""
        if target in FINETUNE_RULES:
            exit_with(f"{target}: no run of this config finetunes; give one the section finetune")
        if target in DETOXIFY_RULES:
            exit_with(f"{target}: this config detoxifies no model; give it the section detoxify")
        if target in RETRIEVAL_RULES:
            exit_with(f"{target}: {self.retrieval.absent(target)}")
        if target in RETRO_RULES:
            exit_with(f"{target}: no run of this config has train.objective: retro")
        path = os.path.relpath(target)
        top, _, below = path.partition("/")
        name, _, rest = below.partition("/")
        segment = re.fullmatch(r"(train|evaluate)\.(\d+)\.json", rest)
        if name in self.config.runs and segment:
            last = self.config.runs[name].train.num_steps
            if last is not None and int(segment[2]) >= last:
                exit_with(
                    f"{target}: run {name} ends at step {last:,}; its last job makes "
                    f"results/{name}/{segment[1]}.json, and segments end at steps before"
                )
        if self.snakemake.is_produced(path) or Path(path).exists():
            return
        runs = self.config.all_runs
        if top == "results" and any(
            self.snakemake.is_produced(f"{RUN.format(run=run)}/{rest}") for run in runs
        ):
            exit_with(f"{target}: no run is called {name}; there is {', '.join(runs)}")
        close = get_close_matches(target, self.snakemake.rule_names(), n=1)
        advice = f"did you mean {close[0]}?" if close else "`snakemake --list` lists the rules"
        exit_with(f"{target}: no rule has this name or writes this file; {advice}")
