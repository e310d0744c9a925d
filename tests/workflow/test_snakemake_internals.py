"""Private names of Snakemake, each in a small workflow of its own.

If a version of Snakemake changes one of them, a test here fails by its name.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.pbs_servers import stand_in
from tests.support.snakefiles import HEAD, run
from tokamake.errors import UserError
from tokamake.workflow.snakemake_internals import check_braces

pytestmark = pytest.mark.usefixtures("snakemake_version")

MAKE = """
rule make:
    output: "{name}.txt"
    shell: "echo {wildcards.name} > {output}"
"""


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
    (names,) = printed(tmp_path, "SNAKEMAKE.config_files", options=("--configfile", "a.yaml"))
    assert names.endswith("a.yaml']")


def test_settings_of_the_command_line(tmp_path: Path) -> None:
    options = ("--config", "train={train_steps: 5}", "seed=1")
    (names,) = printed(tmp_path, "SNAKEMAKE.overrides", options=options)
    assert names == "['train.train_steps', 'seed']"


def test_paths_and_declared_resources_without_options(tmp_path: Path) -> None:
    expressions = (
        *("SNAKEMAKE.config_files", "SNAKEMAKE.repository"),
        "SNAKEMAKE.declared_resources()['nodes'].value",
    )
    assert printed(tmp_path, *expressions) == [*("[]", str(tmp_path.parent), "1")]


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
print("config:", config, file=sys.stderr)
SNAKEMAKE.on_start(lambda: open("started", "w").close())
"""
        + MAKE
    )
    done = run(tmp_path, MODULE, "--config", "beta=2")
    assert done.returncode == 0, done.stderr
    assert "module: inner_make" in done.stderr
    assert "names: ['make', '']" in done.stderr
    assert "config: {'a': 1}" in done.stderr
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
