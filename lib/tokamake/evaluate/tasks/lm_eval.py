"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness), by their names.

Bundled tasks read datasets of the Hugging Face Hub: `tokamake fetch-task` downloads them. Tasks in
YAML files of one's own read any files.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.tasks import TaskSettings
    from tokamake.evaluate.scorer import Scorer

NEEDS_DATA = False
IS_FETCHED = True
SETTINGS = {
    "tasks": {
        "default": [],
        "description": "Names of tasks, groups or tags, such as hellaswag or mmlu.",
    },
    "include": {"default": "", "description": "Folder with YAML files of tasks of one's own."},
    "num_fewshot": {
        "default": -1,
        "ge": -1,
        "description": "Examples before each question; -1: as the task says.",
    },
    "limit": {"default": 0, "ge": 0, "description": "Maximum documents of each task; 0: all."},
    "chat": {"default": False, "description": "Whether prompts get the chat template."},
    "allow_code": {
        "default": False,
        "description": "Whether tasks may run the code that the model writes.",
    },
}


def check(settings: "TaskSettings") -> None:
    """Check settings, as far as possible without lm-eval.

    Raises:
        UserError: no task is named, the folder does not exist, or lm-eval is not installed.
    """
    names, include = settings.own["tasks"], settings.own["include"]
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError("tasks: name at least one task of lm-eval, such as [hellaswag]")
    if include and not Path(include).is_dir():
        raise UserError(f"include: {include}: no such folder; fix the path")
    if find_spec("lm_eval") is None:
        raise UserError("lm_eval is not installed; pip install 'tokamake[lm-eval]'")


def files(settings: "TaskSettings") -> list[Path]:
    """Return the files of the folder `include`: tasks, and data beside them."""
    include = settings.own["include"]
    paths = sorted(Path(include).rglob("*")) if include else []
    return [path for path in paths if path.is_file() and path.parent.name != "__pycache__"]


def evaluation_sets(settings: "TaskSettings") -> dict[str, dict[str, Any]]:
    """Return the local files of the tasks and the fields of their questions, by names of tasks.

    Raises:
        UserError: a task reads no local files.
    """
    from tokamake.evaluate.tasks import _lm_eval_files

    include = settings.own["include"]
    if not include:
        raise UserError(
            "lm-eval's own tasks have no local files; list the other tasks in `tasks`, and name "
            "local copies of their data in `files`"
        )
    return _lm_eval_files.evaluation_sets(settings.own["tasks"], Path(include))


def fetch(settings: "TaskSettings") -> None:
    """Download the datasets of the tasks into the cache of the Hub.

    Raises:
        UserError: tasks are missing or unknown, or a dataset cannot be read.
    """
    _loaded(settings)


def _loaded(settings: "TaskSettings") -> Any:
    """The manager of tasks; it has read the tasks of the settings and their data."""
    check(settings)
    if settings.own["allow_code"]:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # tasks read it when they are loaded
    from lm_eval.tasks import TaskManager

    names, include = settings.own["tasks"], settings.own["include"]
    # To list the bundled tasks takes seconds, so look whether one's own suffice.
    for is_bundled in (False, True):
        manager = TaskManager(include_path=include or None, include_defaults=is_bundled)
        unknown = [name for name in names if name not in {*manager.all_tasks}]
        if not unknown:
            break
    if unknown:
        raise UserError(f"tasks: {', '.join(unknown)}: lm-eval knows no such task; fix the name")
    try:
        manager.load(names)
    except Exception as error:  # of any package that reads data
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"tasks: {', '.join(names)}: their data cannot be read ({reason}); where there is a "
            "network, run tokamake fetch-task"
        ) from None
    return manager


def evaluate(scorer: "Scorer", settings: "TaskSettings") -> dict[str, Any]:
    """Score the model on the tasks.

    Returns:
        Each metric of each task and group, as TASK/METRIC, and its standard error.

    Raises:
        UserError: tasks are missing or unknown, or their data are not there.
    """
    manager = _loaded(settings)
    from lm_eval import simple_evaluate

    from tokamake.evaluate.harness_model import HarnessModel

    own = settings.own
    try:
        results = simple_evaluate(
            HarnessModel(scorer),
            tasks=[*own["tasks"]],
            task_manager=manager,
            num_fewshot=None if own["num_fewshot"] < 0 else own["num_fewshot"],
            limit=own["limit"] or None,
            apply_chat_template=own["chat"],
            confirm_run_unsafe_code=own["allow_code"],
            log_samples=False,
        )
    except (ValueError, NotImplementedError) as error:  # tasks for other kinds of models
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"tasks: {', '.join(own['tasks'])}: lm-eval cannot run them: {reason}"
        ) from None
    scores = {}
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        for metric, value in metrics.items():
            name, _, filtered = metric.partition(",")
            if isinstance(value, int | float):
                key = name if filtered in ("", "none") else f"{name} ({filtered})"
                scores[f"{task}/{key}"] = value
    return scores
