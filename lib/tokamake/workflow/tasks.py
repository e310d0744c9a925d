"""Tasks that models are scored on, as functions for rules. Wildcards: run, task, segment."""

import json
from typing import Any

from tokamake.config.data_set import RUN
from tokamake.config.tasks import TaskSettings
from tokamake.errors import naming
from tokamake.evaluate.evaluate_task import check_task, local_files
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.segments import SegmentRules
from tokamake.workflow.snakemake_internals import check_braces


class TaskRules:
    """Tasks of all runs; each segment's checkpoint is scored."""

    def __init__(self, config: WorkflowConfig, segments: SegmentRules) -> None:
        self._config, self._segments = config, segments
        tasks = [each for run in config.runs.values() for each in run.evaluate.tasks.items()]
        self.names = sorted({name for name, _ in tasks})
        """Keys of the tasks of any run."""
        self.fetched = sorted({name for name, task in tasks if task.is_fetched})
        """Keys of tasks whose data the login node downloads."""

    def check(self) -> None:
        """Check tasks, as far as possible before a model exists."""
        for name, run in self._config.runs.items():
            for key, task in run.evaluate.tasks.items():
                setting = f"run {name}: evaluate.tasks.{key}"
                with naming(setting):
                    check_task(task)
                    paths = local_files(task)
                check_braces(paths, setting)

    def _task(self, wildcards: Any) -> TaskSettings:
        return self._config.runs[wildcards.run].evaluate.tasks[wildcards.task]

    def plug_in(self, wildcards: Any) -> str:
        """Name of the plug-in of a task."""
        return self._task(wildcards).name

    def settings(self, wildcards: Any) -> str:
        """Settings of a task as JSON."""
        settings = self._task(wildcards).model_dump(mode="json")
        del settings["name"]
        return json.dumps(settings, sort_keys=True)

    def local_inputs(self, wildcards: Any) -> list[str]:
        """Local files of a task: the task is done again if one of them changes."""
        return list(map(str, local_files(self._task(wildcards))))

    def fetched_inputs(self, wildcards: Any) -> list[str]:
        """The file that exists once the data of a task are downloaded."""
        is_fetched = self._task(wildcards).is_fetched
        return [f"{RUN}/tasks/{{task}}.fetched"] if is_fetched else []

    def scores(self, wildcards: Any) -> list[str]:
        """Scores of a trained run, by task."""
        tasks = self._config.runs[wildcards.run].evaluate.tasks
        return [f"{RUN}/tasks/{task}.json" for task in tasks]

    def segment_scores(self, wildcards: Any) -> list[str]:
        """Scores of a run after each segment but the last, by task."""
        return [
            f"{RUN}/tasks/{task}.{step}.json"
            for task in self._config.runs[wildcards.run].evaluate.tasks
            for step in self._segments.ends(wildcards.run)
        ]

    def outputs_for_all_runs(self, outputs: list[str]) -> list[str]:
        """Files that a rule with the wildcard `task` makes at the ends of all runs."""
        return [
            output.format(run=run, task=task, segment="")
            for output in outputs
            for run, settings in self._config.runs.items()
            for task, value in settings.evaluate.tasks.items()
            if ".fetched" not in output or value.is_fetched
        ]
