"""The mpiexec of a launch script: its path, version and accepted options."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT, SUPPORT
from tests.support.runs import MPICH
from tokamake.doctor import launcher
from tokamake.doctor.launcher import Launcher
from tokamake.doctor.result import Result

PYTHON = sys.executable
PALS = SUPPORT / "pals_standin.py"
OPTIONS = ("--envall", "--line-buffer", "--np", "--ppn", "--hostfile", "--cpu-bind")
DEPTH = {"polaris": ("--depth",)}
HELP = """\
Usage: mpiexec [global_options] [command_options] cmd1
--envall              Export all env vars (default)
--cpu-bind            Bind ranks to CPUs
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def check(profile: str) -> Result:
    (result,) = launcher.check_launcher(
        launcher.read_launcher(ROOT / f"profiles/{profile}/launch.sh")
    )
    return result


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a site's programs, without an mpiexec; tokamake is in an environment of its own."""
    (tmp_path / "site").mkdir()
    (tmp_path / "tools").mkdir()
    for name in ("bash", "dirname", "readlink", "sleep"):
        (tmp_path / "tools" / name).symlink_to(shutil.which(name) or name)
    program(tmp_path / "environment/tokamake", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment/python"))
    monkeypatch.setenv("PATH", f"{tmp_path}/site:{tmp_path}/tools")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return tmp_path / "site"


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ('exec mpiexec --np=1 \\\n    -n 2 --cpu-bind="$bind" "$@"\n', "mpiexec",
         ("--np", "-n", "--cpu-bind")),
        ('exec "$mpiexec" --np "$1" --np=2 "$@" --mine\n', "mpiexec", ("--np",)),
        ("# exec mpiexec\nexec srun --nodes 1\n", "srun", ("--nodes",)),
        ('exec "$(dirname "$0")/../other/launch.sh" "$@"\n', "srun", ()),
        ("exec python ranks.py\n", "", ()),
    ],
)  # fmt: skip
def test_the_last_command_of_a_launch_script(
    tmp_path: Path, text: str, name: str, options: tuple[str, ...]
) -> None:
    for folder, lines in (("first", text), ("other", "exec srun\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "launch.sh").write_text(lines)
    script = launcher.read_launcher(tmp_path / "first/launch.sh")
    assert (script.name, script.options) == (name, options)


def test_scripts_of_a_chain_are_sourced_in_their_order_from_their_own_folders(
    tmp_path: Path,
) -> None:
    for folder, last in (("a b", 'exec "$(dirname "$0")/../c/launch.sh" "$@"'), ("c", "exec srun")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.sh").write_text(f"echo {folder}\n")
        text = f'. "$(dirname "$0")/own.sh" # modules\n[ "$1" ] || . nothing.sh\n{last}\n'
        (tmp_path / folder / "launch.sh").write_text(text)
    setup = launcher.read_launcher(tmp_path / "a b/launch.sh").setup
    process = subprocess.run(["bash", "-c", setup], capture_output=True, text=True, check=True)
    assert process.stdout == "a b\nc\n"


@pytest.mark.parametrize("profile", ["aurora", "polaris", "sunspot"])
def test_an_mpiexec_of_pals_is_ok(site: Path, profile: str) -> None:
    command = shlex.join([PYTHON, "-IS", str(PALS), str(MPICH), str(site)])
    program(site / "mpiexec", f'exec {command} "$@"')
    parsed = launcher.read_launcher(ROOT / f"profiles/{profile}/launch.sh")
    assert parsed.options == (*OPTIONS, *DEPTH.get(profile, ()))
    assert check(profile).line == (
        f"ok       mpiexec: {site}/mpiexec, mpiexec version 1.8.0 revision 0; takes the options of "
        f"{parsed.script}"
    )
    assert not list(site.glob("*.calls"))  # nothing was started


@pytest.mark.parametrize("profile", ["aurora", "polaris", "sunspot"])
def test_a_real_mpich_refuses_options_of_pals(site: Path, profile: str) -> None:
    (site / "mpiexec").symlink_to(MPICH / "bin/mpiexec")
    result = check(profile)
    assert result.state == "wrong"
    assert f"{site}/mpiexec, HYDRA build details: Version: " in result.value
    refused = "--line-buffer, --cpu-bind" + ", --depth" * (profile == "polaris")
    assert f"; refuses {refused} of " in result.value
    assert "load the module" in result.remedy


def test_the_mpiexec_of_the_environment_is_ignored(site: Path, tmp_path: Path) -> None:
    program(tmp_path / "environment/mpiexec", "echo of the environment")
    result = check("aurora")
    assert result.state == "warning"
    assert f"{ROOT}/profiles/aurora/launch.sh: no mpiexec on PATH outside" in result.value
    program(site / "mpiexec", "echo of the site")
    assert check("aurora").value.startswith(f"{site}/mpiexec, of the site; not known: whether")


def test_a_script_that_uses_the_first_mpiexec_on_path(site: Path, tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text('exec mpiexec -n "$2" "$@"\n')
    parsed = launcher.read_launcher(script)
    (result,) = launcher.check_launcher(parsed)
    assert result.value == f"not known: {script}: no mpiexec on PATH (exit status 2)"
    program(site / "mpiexec", "echo 'takes: -n'; echo more")
    (result,) = launcher.check_launcher(parsed)
    assert result.value == f"{site}/mpiexec, takes: -n; takes the options of {script}"
    # A job runs the first mpiexec on PATH, unless the script names another.
    program(tmp_path / "environment/mpiexec", "echo unrecognized argument n")
    (result,) = launcher.check_launcher(parsed)
    assert result.state == "wrong"
    assert result.value.startswith(f"{tmp_path}/environment/mpiexec, ")
    script.write_text(f'mpiexec={site}/mpiexec\nexec "$mpiexec" -n "$2" "$@"\n')
    (result,) = launcher.check_launcher(launcher.read_launcher(script))
    assert result.value.startswith(f"{site}/mpiexec, takes: -n")


def test_an_mpiexec_that_does_not_answer_is_reported(site: Path) -> None:
    program(site / "mpiexec", "sleep 600")
    parsed = launcher.read_launcher(ROOT / "profiles/aurora/launch.sh")
    (result,) = launcher.check_launcher(parsed, seconds=0.5)
    assert (result.state, result.value) == ("warning", "not known: no answer within 0.5 s")


def test_other_launchers_are_not_checked() -> None:
    assert launcher.check_launcher(Launcher()) == []
    assert launcher.check_launcher(Launcher("srun", ("--nodes",))) == []


@pytest.mark.parametrize(
    ("listed", "answer", "state", "message"),
    [
        (HELP, "mpiexec version 1.8.0", "ok", "takes the options of launch.sh"),
        (HELP, "mpiexec: unrecognized option '--cpu-bind'", "wrong", "refuses --cpu-bind"),
        ("", "[mpiexec@n1] match_arg (args.c:166): unrecognized argument cpu-bind\nmain: error",
         "wrong", "refuses --cpu-bind"),
        ("", 'mpiexec: Error: unknown option "--cpu-bind"', "wrong", "refuses --cpu-bind"),
        # None of these answers is about that option.
        ("", "mpiexec: unrecognized option '--cpu-bind-to'", "ok", "not known: whether"),
        ("", "mpiexec: unrecognized option '--version'", "ok", "not known: whether"),
        ("", "no executable specified", "ok", "not known: whether it takes --envall, --cpu-bind"),
        ("  -cpu-bind <value>", "", "ok", "not known: whether it takes --envall"),
        ("--envall --no-cpu-bind", "", "ok", "not known: whether it takes --cpu-bind"),
    ],
)  # fmt: skip
def test_refused_options_are_wrong(listed: str, answer: str, state: str, message: str) -> None:
    parsed = Launcher("mpiexec", ("--envall", "--cpu-bind"), Path("launch.sh"))
    answers = {"--envall": "", "--cpu-bind": answer}
    result = launcher.mpiexec_result(parsed, "mpiexec, 1.0", help_text=listed, responses=answers)
    assert result.state == state
    assert f"mpiexec, 1.0; {message}" in result.value
