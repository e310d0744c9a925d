"""The command line: instant help from docstrings, one line and exit status 2 for mistakes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.grids import params
from tests.support.programs import programs
from tokamake import cli, plugins
from tokamake.commands import ONLY_RULES, STAGES, commands

COMMANDS = cli.COMMANDS


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [programs("tokamake") / "tokamake", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=600, check=False
    )


def test_help_names_every_stage_with_its_sentence() -> None:
    short, result = run("--help"), run("--help-all")
    assert (short.returncode, result.returncode) == (0, 0)
    assert {*commands(STAGES)} > ONLY_RULES
    for stage in COMMANDS:
        assert (f" {stage} " in short.stdout) == (stage not in ONLY_RULES)
        words = cli.summary(stage).split()
        assert len(words) > 4
        assert f" {stage} " in result.stdout
        assert " ".join(words[:3]) in result.stdout


HELP = """
import io, json, sys
from contextlib import redirect_stdout, suppress

from tokamake import cli

pages = {}
for stage in cli.COMMANDS:
    sys.argv, text = ["tokamake", stage, "--help"], io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        cli.main()
    modules = sorted({module.partition(".")[0] for module in sys.modules})
    pages[stage] = text.getvalue(), modules  # of earlier stages, too: none may be heavy
print(json.dumps(pages))
"""
HEAVY = {
    *("torch", "deepspeed", "transformers", "tokenizers", "pandas", "bokeh", "pyarrow"),
    "datasets",
}


def test_every_stage_has_help_for_every_option_without_heavy_imports() -> None:
    result = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    pages = json.loads(result.stdout)
    assert pages.keys() == COMMANDS.keys()
    for stage, (text, modules) in pages.items():
        assert not HEAVY & {*modules}, stage
        assert f"Usage: tokamake {cli.title(stage)} " in text
        for line in text.splitlines():
            if "│" in line and " --" in line:
                described = line.split("  ")
                assert len([part for part in described if part.strip(" │*")]) > 1, line


@pytest.mark.parametrize(
    ("typed", "called"),
    [
        ("evaluate --task lambada --data a b", "evaluate-task lambada --data a b"),
        ("evaluate --batch-size 2 --task=rte", "evaluate-finetuned rte --batch-size 2"),
        ("evaluate --data a", "evaluate --data a"),
        ("generate --task rte", "generate --task rte"),
    ],
)
def test_evaluate_finds_the_subcommand_of_a_task(typed: str, called: str) -> None:
    assert cli._by_task(typed.split()) == called.split()


def test_a_task_has_one_kind_and_the_former_name_names_the_new_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks, labeled = ({*plugins.names(folder)} for folder in cli.TASK_FOLDERS.values())
    assert not benchmarks & labeled
    assert cli._by_task(["evaluate-task", "lambada"]) == ["evaluate-task", "lambada"]
    assert capsys.readouterr().err == ""  # the log of a rule stays as it was
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    cli._by_task(["evaluate-finetuned", "rte"])
    assert "`evaluate --task NAME`" in capsys.readouterr().err


MISTAKES = {
    ("evaluate", "--task"): "--task has no value; choose one of lambada, ",
    ("evaluate", "--checkpoint", "x", "--task=lambda"): "no such task; did you mean lambada",
    (
        *("evaluate", "--checkpoint", "x", "--task", "rte", "--data", "a=b", "--weights", "x"),
    ): "option: --weights. See `tokamake evaluate --task NAME",
    ("evaluate", "--checkpoint", "x", "--task", "wikitext", "--stride", "512"): "--stride: a "
    """setting of wikitext; write --settings '{"stride": VALUE}'. See `tokamake evaluate --task""",
    ("tokenise",): 'Unknown command "tokenise". Did you mean "tokenize"? See `tokamake --help`.',
    ("tokenize", "a.jsonl", "--outptu", "b"): "--outptu. Did you mean --output? See `tokamake",
    ("tokenize", "a.jsonl", "--json-keys", "b"): "option: --json-keys. See `tokamake tokenize",
    ("tokenize", "a", "--output", "b", "--tokenizer", "c", "d"): "d: belongs to no option; tokenize"
    " takes FILES and options. See",
    ("doctor", "my.yaml"): "my.yaml: belongs to no option; doctor takes the options --profile, --",
    ("train", "a b.yaml"): "--config is missing; write --config 'a b.yaml'. See `tokamake train",
    ("train", "--confg", "a"): "--config is missing. Did you mean --config instead of --confg? See",
    ("new",): "new: PROJECT is missing; add it.",
    ("run", "-n"): "run: CONFIG is missing; add it.",
    ("tokenize", "--output", "b", "--tokenizer", "c"): "FILES is missing; add it.",
    ("merge", "pair"): "--output is missing; add it.",
    ("convert", "--to", "b"): "--from, --format are missing; add them.",
    ("convert", "--to", "b", "--from"): "--from requires an argument",
    ("tokenize", "a.jsonl", "--output", "b", "--tokenizer", "c", "--workers", "x"): "--workers",
    (
        "tokenize",
        "none.jsonl",
        "--output",
        "b",
        "--tokenizer",
        "none",
    ): "tokenizer none: no such file",
    ("merge", "none", "--output", "b"): "none.bin: no such file",
    ("train", "--config", "none.yaml"): "none.yaml: no such file",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert MISTAKES[arguments] in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_in_help_texts_are_valid_calls(command: str) -> None:
    arguments = [command, *shlex.split(COMMANDS[command].example)]
    _, bound, _ = cli.make_app(command).parse_args(
        arguments, print_error=False, exit_on_error=False
    )
    assert bound.arguments


@pytest.mark.parametrize("command", ["tokenize", "train-tokenizer"])
def test_help_lists_all_formats(command: str) -> None:
    help_text = " ".join(run(command, "--help").stdout.replace("│", " ").split())
    assert f"format of the files: {', '.join(plugins.names('data/readers'))}; empty" in help_text


def test_an_interrupt_during_imports_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cyclopts.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    (tmp_path / "difflib.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    for module, name in (("cyclopts", "tokamake tokenize"), ("difflib", "tokamake")):
        (tmp_path / "early").mkdir(exist_ok=True)
        (tmp_path / f"{module}.py").replace(tmp_path / "early" / f"{module}.py")
        result = subprocess.run(
            [sys.executable, "-m", "tokamake", "tokenize", "--help"],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "early")},
            capture_output=True,
            text=True,
            check=False,
            # Tests that a shell has started in the background inherit an ignored SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert result.stderr == f"{name}: stopped; the same command continues\n"
        assert result.returncode == 130


BLOCKED = [package for packages in cli.EXTRAS.values() for package in packages]
WITHOUT = (
    f"import sys; sys.modules.update(dict.fromkeys({BLOCKED}))\n"
    "from tokamake.cli import main\nmain()"
)


def without_extras(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a subcommand where no package of the extras is installed."""
    command = [sys.executable, "-c", WITHOUT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("error", "noted"),
    [
        ("UserError('the loss is NaN')", True),
        ("TemporaryError('another process trains there')", False),
        ("OSError(28, 'No space left on device')", False),
    ],
)
def test_executors_learn_which_failures_a_retry_would_meet_again(
    tmp_path: Path, error: str, noted: bool
) -> None:
    script = (
        "import sys; from tokamake import cli; from tokamake.errors import *\n"
        f"def fail(*_): raise {error}\n"
        "sys.argv = ['tokamake']; cli.make_app = lambda stage, **_: App()\n"
        "class App:\n"
        "    def parse_args(self, *_, **__): fail()\n"
        "cli.main()\n"
    )
    note = tmp_path / "failure"
    environment = {**os.environ, "JOB_FAILURE_FILE": str(note)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert result.returncode == (1 if "OSError" in error else 2)
    assert note.exists() == noted


@pytest.mark.parametrize(
    ("stage", "offline"), [("describe", "1"), ("fetch", "None"), ("train", "None")]
)
def test_libraries_of_stages_without_a_network_do_not_ask_the_hub(stage: str, offline: str) -> None:
    script = (
        "import os; from tokamake import cli; os.environ.pop('HF_HUB_OFFLINE', 0)\n"
        "cli.main(); print(os.environ.get('HF_HUB_OFFLINE'))"
    )
    command = [sys.executable, "-c", script, stage, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == offline


def test_data_stages_need_no_torch(workspace: Path) -> None:
    raw, tokenizer = workspace / "raw/code", workspace / "tokenizer"
    shard, merged = workspace / "shard", workspace / "merged"
    for arguments in (
        ("tokenize", raw, "--output", shard, "--tokenizer", tokenizer),
        ("merge", shard, "--output", merged),
        ("describe", merged),
    ):
        done = without_extras(*arguments)
        assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{}")
    done = without_extras("find-learning-rate", "--config", tmp_path / "run.yaml")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("is not installed; pip install 'tokamake[train]'")


def test_extras_are_those_of_the_package() -> None:
    requirements = [Requirement(text) for text in metadata.requires("tokamake") or []]
    for extra, packages in cli.EXTRAS.items():
        optional = {
            each.name.replace("-", "_") for each in requirements if f'"{extra}"' in str(each.marker)
        }
        assert optional == set(packages)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("mix", "1", "a.txt", "--output", ""), "--output"),
        (("mix", "1", "a.txt", "--output="), "--output"),
        (("describe", ""), "PREFIXES"),
        (("trace", "", "3"), "PREFIX"),
    ],
)
def test_an_empty_path_is_named(arguments: tuple[str, ...], option: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0.5 web corpus\n")
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"tokamake {arguments[0]}: {option}: empty; give a path\n"


def test_a_descriptor_that_the_user_has_not_opened_is_refused(tmp_path: Path) -> None:
    """A stage may open an input under this number, which the output would replace."""
    (tmp_path / "a.txt").write_text("0.5 web corpus\n")
    for number in range(3, 12):
        arguments = ("mix", "1", "a.txt", "--output", f"/dev/fd/{number}")
        command = [sys.executable, "-m", "tokamake", *arguments]  # a fork has files of its server
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert f"/dev/fd/{number}: not open; give a path" in result.stderr
    assert (tmp_path / "a.txt").read_text() == "0.5 web corpus\n"


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0.5 web corpus\n")
    result = run("mix", "1", "a.txt", "--output", ".", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "tokamake mix: --output: . is a folder; name a file\n"


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_standard_output_holds_the_result_alone(output: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0.5 web corpus\n")
    result = run("mix", "1", "a.txt", "--output", output, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "1.0 web corpus\n")
    assert "1 dataset of 1 weighting file" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_metadata_may_go_to_standard_output(workspace: Path, tmp_path: Path) -> None:
    prefix, file = tmp_path / "merged", tmp_path / "metadata.json"
    for arguments in (
        ("tokenize", workspace / "raw/code", "--tokenizer", workspace / "tokenizer"),
        ("describe", prefix),
    ):
        output = prefix if arguments[0] == "tokenize" else file
        assert run(*map(str, arguments), "--output", str(output), cwd=tmp_path).returncode == 0
    result = run("describe", str(prefix), "--output", "-", cwd=tmp_path)
    assert json.loads(result.stdout) == json.loads(file.read_text())
    assert result.stderr.startswith("-: 1 dataset, ")


@pytest.mark.parametrize("output", params(["-", "/dev/stdout"], ["-"]))
@pytest.mark.parametrize("stage", sorted(cli.SEVERAL_FILES))
def test_several_files_do_not_go_to_standard_output(
    stage: str, output: str, tmp_path: Path
) -> None:
    option = "--to" if stage == "convert" else "--output"
    arguments = shlex.split(cli.COMMANDS[stage].example)
    arguments[arguments.index(option) + 1] = output
    result = run(stage, *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert f"tokamake {stage}: {output}: {stage} writes several files; name a" in result.stderr
    assert not [*tmp_path.iterdir()]


def test_the_docstring_of_an_output_says_whether_it_is_one_file() -> None:
    for stage, command in cli.COMMANDS.items():
        module = import_module(f"tokamake.{command.package}.{stage.replace('-', '_')}")
        text = getattr(module, stage.replace("-", "_")).__doc__
        described = re.search(r"^        (?:output|target): (.+)", text, re.M)
        if described:
            several = re.search("folder|prefix", described[1].lower()) is not None
            assert several == (stage in cli.SEVERAL_FILES), (stage, described[1])


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0.5 web corpus\n")
    result = run("mix", "1", "a.txt", "--output", "a.txt/b", cwd=tmp_path)
    assert result.returncode == 1
    assert "a.txt" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_bash_completes_subcommands_and_options(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokamake", "--install-completion", "--shell", "bash"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    (script,) = tmp_path.rglob("completions/tokamake")

    def completed(*words: str) -> list[str]:
        typed = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        text = f"source {script}; {typed}; _tokamake; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        result = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
        return result.stdout.split()

    assert completed("tokamake", "sta") == ["status"]
    assert "--watch" in completed("tokamake", "status", "--w")
