"""`tokamake run` and the logger plug-in with real workflows of a few small jobs."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SNAKEFILE = """
rule all:
    input: expand("{name}.txt", name=["a", "b"]), "text.txt"

rule copy:
    output: "{name}.txt"
    log: "logs/{name}.log"
    shell: "echo printed by a job; echo {config[word]} > {output}"

rule write:
    output: "text.txt"
    log: "logs/write.log"
    shell: config["write"]
"""
FAIL = "seq 40 > logs/write.log; echo 'Killed' >> logs/write.log; exit 1"
Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    (tmp_path / "profiles/local").mkdir(parents=True)
    (tmp_path / "profiles/local/profile.yaml").write_text("cores: 2\n")
    (tmp_path / "my.yaml").write_text("word: hello\nwrite: touch text.txt\n")
    (tmp_path / "logs").mkdir()
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokamake", "run", "my.yaml", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_line_for_each_stage_and_a_summary(folder: Path) -> None:
    result = start(folder, "word=other")
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    command = "snakemake --profile profiles/local --configfile my.yaml --config word=other"
    assert lines[0] == command
    assert lines[1].startswith("4 jobs: ")
    assert lines.count("printed by a job") == 2
    rest = [line for line in lines[2:] if line != "printed by a job"]
    assert sorted(line.split()[0] for line in rest) == ["all", "copy", "next", "time", "write"]
    assert any(line.startswith("copy                 done: 2 jobs, ") for line in rest)
    assert (folder / "a.txt").read_text() == "other\n"
    again = start(folder, "word=other")
    assert again.returncode == 0
    assert again.stderr.splitlines()[1:] == [
        "Nothing to be done (all requested files are present and up to date)."
    ]


def test_a_failure_has_the_end_of_its_log_a_remedy_and_the_way_on(folder: Path) -> None:
    result = start(folder, f"write={FAIL}", "--", "--keep-going")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    first = lines.index("write                FAILED; the end of logs/write.log:")
    assert lines[first + 1 : first + 13] == [*(f"    {n}" for n in range(30, 41)), "    Killed"]
    assert lines[first + 13].startswith("    likely remedy: the system killed it")
    assert lines[-1].startswith("write failed; fix the cause, then continue: tokamake run my.yaml")
    assert (folder / "a.txt").exists()
    assert "Traceback" not in result.stderr


def test_a_dry_run_lists_stages_with_reasons(folder: Path) -> None:
    result = start(folder, "-n")
    assert result.returncode == 0
    lines = result.stderr.splitlines()[1:]
    assert [line.split() for line in lines if line.startswith("copy")] == [
        ["copy", "2", "jobs", "missing", "output", "files"]
    ]
    assert lines[-1] == "4 jobs would run; nothing was changed"
    assert not (folder / "a.txt").exists()


def test_snakemakes_own_output_and_a_start_by_snakemake(folder: Path) -> None:
    verbose = start(folder, "--verbose", "-n")
    assert verbose.returncode == 0
    assert "Job stats:" in verbose.stdout + verbose.stderr
    command = ["--profile", "profiles/local", "--configfile", "my.yaml", "--logger", "tokamake"]
    result = subprocess.run(
        [sys.executable, "-m", "snakemake", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "write                done: " in result.stderr
    assert "Select jobs" not in result.stderr


def test_mistakes_are_one_line_before_snakemake_starts(folder: Path) -> None:
    (folder / "my.yaml").write_text("word: [\n")
    result = start(folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tokamake run: my.yaml:1: not valid YAML")
    assert result.stderr.count("\n") == 1


def test_a_second_start_says_that_a_run_works_in_the_folder(folder: Path) -> None:
    os.mkfifo(folder / "begun")
    (folder / "my.yaml").write_text("word: hello\nwrite: echo > begun; exec sleep 600\n")
    command = [sys.executable, "-m", "tokamake", "run", "my.yaml", "text.txt"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as first:
        (folder / "begun").read_text()  # returns when the job has begun
        second, dry_run = start(folder, "text.txt"), start(folder, "text.txt", "-n")
        first.send_signal(signal.SIGTERM)
    assert first.returncode == 143
    assert (second.returncode, dry_run.returncode) == (1, 0)
    _, line = second.stderr.splitlines()
    assert line.startswith("this folder is locked: Snakemake runs, since ")
    assert line.endswith("unlock the folder: tokamake run my.yaml text.txt -- --unlock")
    assert dry_run.stderr.splitlines()[1::2] == [
        line,
        "1 job would run; nothing was changed",
    ]


@pytest.mark.parametrize(
    ("number", "status", "options"),
    [
        (signal.SIGINT, 130, []),
        pytest.param(signal.SIGTERM, 143, ["--verbose"], marks=pytest.mark.grid),
    ],
)
def test_a_signal_stops_all_jobs_and_ends_with_a_sentence(
    folder: Path, number: signal.Signals, status: int, options: list[str]
) -> None:
    """Ctrl-C, a batch system and `kill` reach only `tokamake run`; a terminal has bars."""
    fifo = folder / "begun"
    os.mkfifo(fifo)
    (folder / "my.yaml").write_text("word: hello\nwrite: echo > begun; exec sleep 600\n")
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tokamake", "run", "my.yaml", "text.txt", *options],
        cwd=folder,
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as `command &` does
    )
    os.close(child)
    fifo.read_text()  # returns when the job has begun
    process.send_signal(number)
    shown = b""
    try:
        while part := os.read(parent, 4096):
            shown += part
    except OSError:  # the last writer has closed the terminal
        pass
    os.close(parent)
    assert process.wait() == status
    text = shown.decode()
    command = " ".join(["tokamake run my.yaml text.txt", *options])
    assert text.strip().endswith(f"stopped: finished jobs are kept; continue: {command}")
    if not options:
        assert "0 of 1" in text
        assert "FAILED" not in text
        assert "Exception" not in text
    assert "Traceback" not in text
