"""Start of the workflow: the prefix of shell commands, hooks, missing personal values."""

import errno
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from snakemake_executor_plugin_pbs.base.errors import UserError as ExecutorError
from tests.support.workflows import CONFIG
from tokamake.config.data_set import DataSet
from tokamake.data.corpus.plan_file import Plan, read_plan
from tokamake.runtime.folder_lock import locked
from tokamake.status.jobs import DagJob, read_jobs
from tokamake.workflow import startup
from tokamake.workflow.exit import exit_on_user_error

MISSING = "snakemake_executor_plugin_pbs.base.user_file.missing_in_workflow"


def test_shell_commands_find_the_commands_of_this_environment() -> None:
    command = startup.shell_prefix(MagicMock(uses_conda=False)) + 'echo "${PATH%%:*}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(Path(sys.executable).parent)


def test_shell_commands_fail_with_any_command_of_a_pipe() -> None:
    command = startup.shell_prefix(MagicMock(uses_conda=True)) + "false | cat"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 1


def test_jobs_add_no_hooks() -> None:
    snakemake = MagicMock(is_main_process=False)
    startup.add_hooks(snakemake, MagicMock())
    assert not snakemake.on_start.called
    assert not snakemake.on_error.called


def test_the_main_process_writes_the_plan_at_the_start_and_speaks_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plans: list[Any] = []
    monkeypatch.setattr(startup, "write_plan", lambda path, plan: plans.append((path, plan)))
    settings: list[Any] = []
    monkeypatch.setattr(startup, "write_settings", settings.append)
    snakemake, functions = MagicMock(is_main_process=True, precommand=None), MagicMock()
    functions.config.data_set = DataSet()
    functions.config.previous_plan = None
    job = DagJob("train", "a", ["results/a/train.json"], [], "logs/a/train.log")
    snakemake.jobs.return_value = [job]
    functions.segments.saved_since_start.return_value = ["run a: saved step 5"]
    startup.add_hooks(snakemake, functions)
    for call in snakemake.on_start.call_args_list:
        call.args[0]()
    assert plans == [(Path("results/data/plan.json"), functions.config.plan)]
    assert settings == [functions.config]
    assert read_jobs(tmp_path)["run a"].jobs == [job]
    snakemake.jobs.return_value = [job, job]
    snakemake.on_new_jobs.call_args.args[0]()
    assert read_jobs(tmp_path)["run a"].jobs == [job, job]
    snakemake.on_error.call_args.args[0]()
    assert capsys.readouterr().err == "run a: saved step 5\n"


@pytest.mark.fault("full disk")
def test_a_disk_that_is_full_at_the_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device, while writing", "results/plan.json")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(startup, "write_plan", full)
    monkeypatch.setattr(startup, "write_settings", lambda _: None)
    functions = MagicMock()
    functions.config.plan = functions.config.previous_plan
    snakemake = MagicMock(precommand=None)
    snakemake.planned_rules.return_value = set()
    with pytest.raises(SystemExit, match="2"):
        startup._start(snakemake, functions)
    assert capsys.readouterr().err == (
        "tokamake: results/plan.json: No space left on device, while writing; free some space, "
        "then rerun\n"
    )


def test_ctrl_c_before_the_jobs_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="130"), exit_on_user_error():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "tokamake: interrupted\n"


LOCKED = "tokamake: results/data: another process makes data there; end it (pid {pid} on "


@pytest.mark.parametrize("executes", [True, False])
def test_the_first_plan_is_written_before_the_dag(
    executes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atexit.register", lambda *call: call[0](*call[1:]))  # unlocks the data
    plan = Plan({}, "", (), (), (), (), ())
    config = MagicMock(plan=plan, previous_plan=None, data_set=DataSet())
    targets = MagicMock(config=config)
    snakemake = MagicMock(is_main_process=True, executes_jobs=executes)
    expanded = startup._expand_targets(snakemake, targets, ["train"])
    assert expanded == targets.expand.return_value
    path = Path("results/data/plan.json")
    assert (read_plan(path) if path.exists() else None) == (plan if executes else None)


CHANGED = "tokamake: results/data/plan.json: written by another process since this one has read it"


@pytest.mark.parametrize(
    ("plan", "rules", "message"),
    [
        ("as read", {"train", "weigh"}, ""),
        ("as read", {"merge"}, LOCKED),
        ("new files", {"train"}, LOCKED),
        ("as read", {"merge"}, CHANGED),
        ("new files", set(), ""),
    ],
)
def test_one_process_at_a_time_changes_a_data_set(
    plan: str,
    rules: set[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    on_disk = "another" if message == CHANGED else "as read"
    monkeypatch.setattr(startup, "read_previous", lambda _: on_disk)
    config = MagicMock(plan=plan, previous_plan="as read", data_set=DataSet())
    snakemake = MagicMock()
    snakemake.planned_rules.return_value = rules
    released: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: released.append(partial(*call)))
    with (
        locked(Path("results/data")) if message == LOCKED else nullcontext(),
        pytest.raises(SystemExit, match="2") if message else nullcontext(),
    ):
        startup._lock_data(snakemake, config)
    assert capsys.readouterr().err.startswith(message.format(pid=os.getpid()))
    is_locked = bool(rules & {"merge"}) or plan == "new files"
    assert Path("results/.data.lock").exists() == is_locked
    for function in released:
        function()
    with locked(Path("results/data")):
        pass


def test_a_wrong_config_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    snakemake = MagicMock(is_main_process=True, config_files=["my.yaml"], repository=Path())
    with pytest.raises(SystemExit, match="2"):
        startup.rule_functions(snakemake, {**CONFIG, "modle": 1}, planned_segments=str)
    assert capsys.readouterr().err.startswith("tokamake: my.yaml: modle: unknown key")


@pytest.mark.parametrize("is_main", [True, False])
def test_missing_personal_values_end_the_main_process_alone(
    is_main: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MISSING, lambda resources: f"no {resources}")
    snakemake = MagicMock(is_main_process=is_main)
    snakemake.declared_resources.return_value = "account"
    if not is_main:
        startup.finish(snakemake, MagicMock())
        return
    with pytest.raises(SystemExit, match="2"):
        startup.finish(snakemake, MagicMock())
    assert capsys.readouterr().err == "tokamake: no account\n"


def test_a_wrong_user_file_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(_: Any) -> str:
        raise ExecutorError("pbs.yaml: wrong")

    monkeypatch.setattr(MISSING, wrong)
    with pytest.raises(SystemExit, match="2"):
        startup.finish(MagicMock(is_main_process=True), MagicMock())
    assert capsys.readouterr().err == "tokamake: pbs.yaml: wrong\n"


def test_without_the_executors_there_are_no_personal_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are packages of their own."""
    monkeypatch.setattr(MISSING, lambda _: "no account")
    monkeypatch.setattr(startup, "find_spec", lambda _: None)
    startup.finish(MagicMock(is_main_process=True), MagicMock())
    assert not capsys.readouterr().err
