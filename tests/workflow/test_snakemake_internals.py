"""Private names of Snakemake, each in a small workflow of its own.

If a version of Snakemake changes one of them, a test here fails by its name.
"""

import ast
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.pbs_servers import stand_in
from tests.support.snakemake_server import start
from tokamake.errors import UserError
from tokamake.workflow.snakemake_internals import check_braces

pytestmark = pytest.mark.usefixtures("snakemake_version")

HEAD = """
from tokamake.workflow.snakemake_internals import Snakemake
SNAKEMAKE = Snakemake(workflow)
"""
MAKE = """
rule make:
    output: "{name}.txt"
    shell: "echo {wildcards.name} > {output}"
"""


def run(
    folder: Path, snakefile: str, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    (folder / "Snakefile").write_text(HEAD + snakefile)
    return start(["--cores", "1", *arguments], folder, environment)


def printed(folder: Path, *expressions: str, options: Sequence[str] = (), before: str = "") -> list:
    """Values of expressions where the workflow is read, as text."""
    rules = 'rule all:\n    output: "a.txt"\n    resources: nodes=1\n    shell: "touch {output}"\n'
    values = f"[str(value) for value in ({', '.join(expressions)},)]"
    snakefile = f"{before}\n{rules}\nprint('values:', {values}, file=__import__('sys').stderr)\n"
    done = run(folder, snakefile, "-n", *options)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("values: ")]
    return list(ast.literal_eval(lines[0].removeprefix("values: ")))


def test_only_jobs_are_recognized_as_jobs(tmp_path: Path) -> None:
    snakefile = """
print("main:", SNAKEMAKE.is_main_process, file=__import__("sys").stderr)
rule all:
    output: "a.txt"
    run: open(output[0], "w")
"""
    done = run(tmp_path, snakefile)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("main: ")]
    assert lines == ["main: True", "main: False"]


def test_jobs_are_executed_without_the_option_of_a_dry_run(tmp_path: Path) -> None:
    snakefile = """
def inputs(wildcards):
    print("executes:", SNAKEMAKE.executes_jobs, SNAKEMAKE.uses_conda, file=__import__("sys").stderr)
    return []
rule all:
    input: inputs
    output: "a.txt"
    shell: "touch {output}"
"""
    for options in (["-n"], ["--summary"], ["--sdm", "env-modules", "-n"]):
        assert "executes: False False\n" in run(tmp_path, snakefile, *options).stderr
    assert "executes: False True\n" in run(tmp_path, snakefile, "-n", "--sdm", "conda").stderr
    assert "executes: True False\n" in run(tmp_path, snakefile).stderr
    assert "executes: True False\n" in run(tmp_path, snakefile, "--touch").stderr


def test_config_files_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: 1")
    expressions = ("SNAKEMAKE.config_files", "SNAKEMAKE.main_config")
    names, main = printed(tmp_path, *expressions, options=("--configfile", "a.yaml"))
    assert names.endswith("a.yaml']")
    assert main == "{'x': 1}"


def test_paths_and_declared_resources_without_options(tmp_path: Path) -> None:
    expressions = (
        *("SNAKEMAKE.config_files", "SNAKEMAKE.main_snakefile", "SNAKEMAKE.repository"),
        "SNAKEMAKE.declared_resources()['nodes'].value",
    )
    assert printed(tmp_path, *expressions) == [
        *("[]", str(tmp_path / "Snakefile"), str(tmp_path.parent), "1")
    ]


def test_resources_as_a_profile_gives_them(tmp_path: Path) -> None:
    options = (
        *("--set-resources", "all:nodes=4", "all:tasks=8"),
        *("--default-resources", "launch='x/launch.sh'"),
    )
    expressions = (
        *("SNAKEMAKE.rule_resources('all')", "SNAKEMAKE.rule_resources('other')"),
        *("SNAKEMAKE.default_resource('launch')", "SNAKEMAKE.default_resource('queue')"),
    )
    assert printed(tmp_path, *expressions, options=options) == [
        *("{'nodes': 4, 'tasks': 8}", "{}", "'x/launch.sh'", "None")
    ]


def test_a_default_resource_is_replaced_in_jobs_too(tmp_path: Path) -> None:
    snakefile = """
SNAKEMAKE.resolve_launch()
rule all:
    output: "a.txt"
    shell: "echo '{resources.launch}' > {output}"
"""
    folder, launch = tmp_path / "else where/workflow", tmp_path / "else where/x/launch.sh"
    for path in (folder, launch.parent):
        path.mkdir(parents=True)
    launch.touch()
    done = run(folder, snakefile, "--default-resources", "launch='x/launch.sh'")
    assert done.returncode == 0, done.stderr
    assert (folder / "a.txt").read_text() == f"{launch}\n"


def test_rules_and_outputs_are_known_by_name(tmp_path: Path) -> None:
    expressions = (
        *("SNAKEMAKE.rule_names()", "SNAKEMAKE.is_rule('make')", "SNAKEMAKE.is_rule('b.txt')"),
        *("SNAKEMAKE.is_produced('b.txt')", "SNAKEMAKE.is_produced('b.md')"),
        "SNAKEMAKE.outputs('make')",
    )
    before = MAKE.replace("{name}", "{name,b+}")
    assert printed(tmp_path, *expressions, options=["a.txt"], before=before) == [
        *("['make', 'all']", "True", "False", "True", "False", "({'name'}, ['{name}.txt'])")
    ]


def test_a_forced_job_runs_again_and_a_dry_run_says_so(tmp_path: Path) -> None:
    snakefile = f"""
import os
def inputs(wildcards):
    if os.path.exists("broken"):
        SNAKEMAKE.force_job("a.txt")
    return []
{MAKE.replace("    output", "    input: inputs" + chr(10) + "    output")}
"""
    assert run(tmp_path, snakefile, "a.txt").returncode == 0
    assert "Nothing to be done" in run(tmp_path, snakefile, "-n", "a.txt").stdout
    (tmp_path / "broken").touch()
    done = run(tmp_path, snakefile, "-n", "a.txt")
    assert "Forced execution" in done.stdout + done.stderr


def test_a_param_that_is_a_function_of_the_output_reruns_nothing(tmp_path: Path) -> None:
    # The rule `report` has the path of the Snakefile in such a param.
    rule = 'rule make:\n    output: "a.txt"\n    params: VALUE\n    shell: "touch {output}"\n'
    for arguments, is_done in (("wildcards, output", True), ("wildcards", False)):
        first, second = (
            rule.replace("VALUE", f"lambda {arguments}: '/{folder}/Snakefile'") for folder in "ab"
        )
        assert run(tmp_path, first, "--forceall").returncode == 0
        done = run(tmp_path, second, "-n")
        assert ("Nothing to be done" in done.stdout + done.stderr) == is_done


def test_rules_with_jobs_to_run_are_planned(tmp_path: Path) -> None:
    snakefile = f"""
SNAKEMAKE.on_start(lambda: print("planned:", sorted(SNAKEMAKE.planned_rules())))
rule all:
    input: "a.txt"
    output: "all.txt"
    shell: "touch {{output}}"
{MAKE}
"""
    assert "planned: ['all', 'make']" in run(tmp_path, snakefile).stdout
    (tmp_path / "all.txt").unlink()
    assert "planned: ['all']" in run(tmp_path, snakefile).stdout


def test_jobs_are_listed_at_the_start_and_when_a_checkpoint_adds_some(tmp_path: Path) -> None:
    snakefile = """
def show():
    print("jobs:", [*map(tuple, SNAKEMAKE.jobs())])
def numbers(wildcards):
    with open(checkpoints.count.get().output[0]) as stream:
        return [f"{number}.txt" for number in range(int(stream.read()))]
SNAKEMAKE.keep_records_beside_outputs()
SNAKEMAKE.on_start(show)
SNAKEMAKE.on_new_jobs(show)
rule all:
    input: numbers
checkpoint count:
    output: "count"
    log: "count.log"
    shell: "echo 1 > {output}"
rule make:
    input: "count"
    output: "{run}.txt"
    log: "{run}.log"
    shell: "touch {output}"
rule unlogged:
    output: "b"
    shell: "touch {output}"
"""
    lines = [line for line in run(tmp_path, snakefile).stdout.splitlines() if "jobs: " in line]
    count = ("count", "", ["count"], [], "count.log", True)
    made = ("make", "0", ["0.txt"], ["count"], "0.log", True)
    assert [ast.literal_eval(line.removeprefix("jobs: ")) for line in lines] == [
        [count], [count, made]
    ]  # fmt: skip


def test_inputs_of_the_last_run_are_recorded(tmp_path: Path) -> None:
    snakefile = """
import sys
def inputs(wildcards):
    print("recorded:", SNAKEMAKE.recorded_inputs("b.txt"), file=sys.stderr)
    return "a.txt"
rule make:
    input: inputs
    output: "b.txt"
    shell: "cp {input} {output}"
"""
    (tmp_path / "a.txt").touch()
    assert "recorded: []" in run(tmp_path, snakefile).stderr
    assert "recorded: ['a.txt']" in run(tmp_path, snakefile).stderr


def test_targets_are_replaced_once_all_rules_are_known(tmp_path: Path) -> None:
    snakefile = f"""
def expand(targets):
    return {{f"{{run}}.txt" for run in "ab"}} if "make" in targets else set(targets)
SNAKEMAKE.expand_targets(expand)
{MAKE}
"""
    done = run(tmp_path, snakefile, "make")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*.txt")} == {"a.txt", "b.txt"}


def test_a_file_written_with_the_targets_is_an_input_of_any_rule(tmp_path: Path) -> None:
    """Snakemake remembers the folder of `b/all.txt` before it asks for the inputs of `make`."""
    snakefile = """
import os
def expand(targets):
    if SNAKEMAKE.executes_jobs:
        os.makedirs("b")
        open("b/plan.json", "w").close()
    return set(targets)
SNAKEMAKE.expand_targets(expand)
rule all:
    input: "a.txt"
    output: "b/all.txt"
    shell: "touch {output}"
rule make:
    input: lambda _: "b/plan.json" if os.path.exists("b/plan.json") else []
    output: "a.txt"
    shell: "cp b/plan.json {output}"
"""
    done = run(tmp_path, snakefile, "-n")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "b").exists()
    done = run(tmp_path, snakefile)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("directive", ["", "onstart:\n    print('own start')\n"])
def test_on_start_and_on_error_are_called_beside_directives(tmp_path: Path, directive: str) -> None:
    snakefile = f"""
{directive}
SNAKEMAKE.on_start(lambda: open("started", "w").close())
SNAKEMAKE.on_error(lambda: open("failed", "w").close())
rule all:
    output: "a.txt"
    shell: "test -e good && touch {{output}}"
"""
    run(tmp_path, snakefile, "-n")
    assert not (tmp_path / "started").exists()
    done = run(tmp_path, snakefile)
    assert done.returncode
    assert (tmp_path / "started").exists()
    assert (tmp_path / "failed").exists()
    assert ("own start" in done.stdout + done.stderr) == bool(directive)
    (tmp_path / "failed").unlink()
    (tmp_path / "good").touch()
    assert run(tmp_path, snakefile).returncode == 0
    assert not (tmp_path / "failed").exists()


MODULE = """
module inner:
    snakefile: "inner.smk"
    config: {"a": 1}

use rule * from inner as inner_*

rule all:
    default_target: True
    input: "a.txt"
"""


def test_names_in_a_module(tmp_path: Path) -> None:
    (tmp_path / "inner.smk").write_text(
        HEAD
        + """
import sys
print("module:", SNAKEMAKE.renamed("make"), file=sys.stderr)
print("names:", [SNAKEMAKE.original_name(n) for n in ("inner_make", "all")], file=sys.stderr)
print("configs:", config, SNAKEMAKE.main_config, file=sys.stderr)
SNAKEMAKE.on_start(lambda: open("started", "w").close())
"""
        + MAKE
    )
    done = run(tmp_path, MODULE, "--config", "beta=2")
    assert done.returncode == 0, done.stderr
    assert "module: inner_make" in done.stderr
    assert "names: ['make', '']" in done.stderr
    assert "configs: {'a': 1} {'beta': 2}" in done.stderr
    assert (tmp_path / "started").exists()


def test_braces_around_a_name_are_a_wildcard() -> None:
    with pytest.raises(UserError, match=r"^weights: a/{x}\.yaml: braces in a path are wildcards"):
        check_braces([Path("a/{x}.yaml")], "weights")
    check_braces([Path("a/{}/{a-b}.yaml")], "weights")


def test_precommand_of_remote_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "workflow"
    for path in (folder, tmp_path / "x"):
        path.mkdir()
    (tmp_path / "x/environment.sh").write_text(f"touch {tmp_path}/sourced\n")
    server = stand_in(tmp_path / "server")
    snakefile = """
SNAKEMAKE.on_start(SNAKEMAKE.resolve_precommand)
rule all:
    output: "a.txt"
    shell: "touch {output}"
"""
    arguments = ("--executor", "pbs", "--jobs", "1", "--precommand", ". x/environment.sh")
    often = ("--seconds-between-status-checks", "1")
    done = run(folder, snakefile, *arguments, *often, environment=server.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "sourced").exists()


def test_a_reason_names_the_settings_that_have_changed(tmp_path: Path) -> None:
    snakefile = """
SNAKEMAKE.keep_records_beside_outputs()
rule all:
    output: "a.txt"
    params: settings=lambda wildcards: SETTINGS, name=NAME
    shell: "touch {output}"
"""

    def reason(settings: str, name: str) -> str:
        done = run(tmp_path, f"SETTINGS, NAME = {settings!r}, {name!r}{snakefile}", "-n")
        reasons = [line for line in (done.stdout + done.stderr).splitlines() if "reason:" in line]
        return reasons[0].partition("since last execution: ")[2]

    settings = '{"steps": 4, "optimizer": {"rate": 0.1, "name": "adamw"}}'
    assert run(tmp_path, f"SETTINGS, NAME = {settings!r}, 'tr'{snakefile}").returncode == 0
    assert reason(settings.replace("0.1", "0.2"), "tr") == "optimizer.rate 0.1 -> 0.2"
    assert reason(settings, "va") == "'tr' -> 'va'"
    assert reason(settings, "t" * 200) == f"'tr' -> '{'t' * 99}…"


KILL = (
    "until grep -q incomplete.*true results/mine/.made_from/a.txt.json; do sleep 0.01; done;"
    " kill -9 $PPID; exit 1;"
)
RECORDED = """
SNAKEMAKE.keep_records_beside_outputs()
rule make:
    output: "results/mine/a.txt"
    params: OPTION
    shell: "echo {params} > {output}"
"""


def reasons(folder: Path, option: str) -> str:
    """Why a dry run would make `a.txt`; empty: it would not."""
    done = run(folder, f"OPTION = {option!r}{RECORDED}", "-n", "--rerun-incomplete")
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if "reason: " in line]
    return "; ".join(lines)


@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the option x made `a.txt`; do not write here."""
    folder = tmp_path_factory.mktemp("recorded")
    assert run(folder, f"OPTION = 'x'{RECORDED}").returncode == 0
    return folder


@pytest.fixture
def recorded(recorded_once: Path, tmp_path: Path) -> Path:
    """A copy of `recorded_once` to write in."""
    return Path(shutil.copytree(recorded_once, tmp_path / "copy"))


def test_records_beside_outputs_outlive_those_of_snakemake(recorded: Path) -> None:
    assert not [*(recorded / ".snakemake/metadata").iterdir()]
    shutil.rmtree(recorded / ".snakemake")
    other = recorded / "other"  # a clone that shares the results
    other.mkdir()
    (other / "results").symlink_to(recorded / "results")
    for folder in (recorded, other):
        assert not reasons(folder, "x")
        assert "Params have changed" in reasons(folder, "y")
    assert run(other, f"OPTION = 'y'{RECORDED}").returncode == 0
    assert "Params have changed" in reasons(recorded, "x")
    assert not reasons(recorded, "y")


def test_records_leave_out_the_plan(recorded: Path) -> None:
    with_plan = RECORDED.replace(
        "    params", '    input: ancient("results/data/plan.json")\n    params'
    )
    (recorded / "results/data").mkdir()
    (recorded / "results/data/plan.json").touch()
    done = run(recorded, f"OPTION = 'x'{with_plan}", "-n")
    assert "Nothing to be done" in done.stdout + done.stderr
    assert run(recorded, f"OPTION = 'y'{with_plan}").returncode == 0
    assert not reasons(recorded, "y")


@pytest.mark.parametrize(
    ("param", "command", "now"),
    [
        ("plan='results/data/plan.json'", "{params.plan:q}", "{input.plan:q}"),
        ("ranks=lambda _: []", "{input.run:q} {params.ranks:q} --output", "{input.run:q} --output"),
    ],
)
def test_a_record_with_a_param_of_earlier_versions_reruns_nothing(
    tmp_path: Path, param: str, command: str, now: str
) -> None:
    (tmp_path / "results/data").mkdir(parents=True)
    (tmp_path / "results/data/plan.json").touch()
    (tmp_path / "run.yaml").touch()
    rule = """
SNAKEMAKE.keep_records_beside_outputs()
rule make:
    input: plan="results/data/plan.json", run="run.yaml"
    output: "results/mine/a.txt"
    params: PARAMS
    shell: "touch {output}; : COMMAND"
"""
    before = rule.replace("PARAMS", f"'x', {param}").replace("COMMAND", command)
    assert run(tmp_path, before).returncode == 0
    after = rule.replace("COMMAND", now)
    assert "Nothing to be done" in run(tmp_path, after.replace("PARAMS", "'x'"), "-n").stdout
    assert "'x' -> 'y'" in run(tmp_path, after.replace("PARAMS", "'y'"), "-n").stdout


def test_the_command_of_another_rule_with_this_param_stays(tmp_path: Path) -> None:
    report = """
SNAKEMAKE.keep_records_beside_outputs()
rule report:
    output: "results/report.html"
    params: ranks=lambda wildcards: []
    shell: "touch {output}; : {params.ranks:q} --report {output:q}"
"""
    assert run(tmp_path, report).returncode == 0
    assert "Nothing to be done" in run(tmp_path, report, "-n").stdout


def test_a_job_without_metadata_is_complete(tmp_path: Path) -> None:
    assert run(tmp_path, f"OPTION = 'x'{RECORDED}", "--drop-metadata").returncode == 0
    assert not reasons(tmp_path, "x")


def test_a_dry_run_names_outputs_without_a_record(recorded: Path) -> None:
    assert "no record" not in run(recorded, f"OPTION = 'y'{RECORDED}", "-n").stderr
    shutil.rmtree(recorded / "results/mine/.made_from")
    done = run(recorded, f"OPTION = 'y'{RECORDED}", "-n")
    assert "Nothing to be done" in done.stdout + done.stderr
    line = "tokamake: 1 finished file (first results/mine/a.txt): no record in .made_from, so a cha"
    assert done.stderr.count(line) == 1
    assert done.stderr.endswith("if one has changed, give --forcerun make\n")
    assert "no record" not in run(recorded, f"OPTION = 'y'{RECORDED}", "--forcerun", "make").stderr
    assert "no record" not in run(recorded, f"OPTION = 'y'{RECORDED}", "-n").stderr


def test_a_damaged_record_reruns_the_job(recorded: Path) -> None:
    for content in ("", "[]", '{"params": 5}'):
        (recorded / "results/mine/.made_from/a.txt.json").write_text(content)
        assert "Params have changed" in reasons(recorded, "x")


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    earlier = RECORDED.replace("SNAKEMAKE.keep_records_beside_outputs()", "")
    assert run(tmp_path, f"OPTION = 'x'{earlier}").returncode == 0
    assert "Params have changed" in reasons(tmp_path, "y")
    assert not reasons(tmp_path, "x")
    assert run(tmp_path, f"OPTION = 'y'{RECORDED}").returncode == 0
    assert (tmp_path / "results/mine/.made_from/a.txt.json").is_file()
    assert not [*(tmp_path / ".snakemake/metadata").iterdir()]


def test_outputs_of_a_job_that_was_killed_are_made_again(recorded: Path) -> None:
    killed = RECORDED.replace('"echo', f'"{KILL} echo')
    (recorded / "Snakefile").write_text(f"OPTION = 'y'{HEAD}{killed}")
    command = [sys.executable, "-m", "snakemake", "--cores", "1"]
    assert subprocess.run(command, cwd=recorded, capture_output=True).returncode == -9
    (recorded / "results/mine/a.txt").touch()  # as if the old output had not been removed yet
    shutil.rmtree(recorded / ".snakemake")
    for option in "xy":
        assert reasons(recorded, option)
    assert run(recorded, f"OPTION = 'y'{RECORDED}", "--rerun-incomplete").returncode == 0
    assert not reasons(recorded, "y")
