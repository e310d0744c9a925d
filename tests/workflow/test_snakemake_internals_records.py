"""Records beside outputs: why a job runs again, by Snakemake's private names.

If a version of Snakemake changes one of them, a test here fails by its name.
"""

import shutil
from pathlib import Path

import pytest

from tests.support.snakefiles import run

pytestmark = pytest.mark.usefixtures("snakemake_version")


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


def test_a_command_with_a_new_param_reruns_a_job_if_the_param_has_a_value(tmp_path: Path) -> None:
    evaluate = """
SNAKEMAKE.keep_records_beside_outputs()
rule evaluate:
    output: "results/mine/a.txt"
    params: 'x', held_out=lambda wildcards, input: []NEW
    shell: "touch {output}; : {params.held_out:q}COMMAND --sequence-length"
"""
    assert run(tmp_path, evaluate.replace("NEW", "").replace("COMMAND", "")).returncode == 0
    evaluate = evaluate.replace("COMMAND", " {params.neighbors:q}")
    for value, is_new in (("[]", False), ("['--nprobe=4']", True)):
        planned = run(tmp_path, evaluate.replace("NEW", f", neighbors=lambda _: {value}"), "-n")
        assert ("Nothing to be done" not in planned.stdout) == is_new, planned.stdout


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
    assert run(recorded, f"OPTION = 'y'{killed}").returncode == -9
    (recorded / "results/mine/a.txt").touch()  # as if the old output had not been removed yet
    shutil.rmtree(recorded / ".snakemake")
    for option in "xy":
        assert reasons(recorded, option)
    assert run(recorded, f"OPTION = 'y'{RECORDED}", "--rerun-incomplete").returncode == 0
    assert not reasons(recorded, "y")
