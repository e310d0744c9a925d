"""Commands of a documentation page: read from its fenced blocks, classified, and run in order.

A block with a title is a file of that name. Other `sh` blocks are commands, `python` blocks are
programs, `text` blocks are output. A command that no table here names is an error, so that a page
has no untested command.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT
from tests.support.programs import programs

RUN = (
    "cat", "cd", "cp", "curl", "echo", "export", "grep", "ls", "mkdir", "printf",
    "profiles/local/launch.sh", "python -", "python -m http.server", "rsync", "sed", "snakemake",
    "sort", "tokamake", "trackio", "uniq",
)  # fmt: skip
"""Commands that run."""
PARSED = (
    ".", "module load", "openssl", "pip install", "python -m venv", "tensorboard",
    "tokamake serve results/mine/training --host", "touch",
)  # fmt: skip
"""Commands that install something, do not end, or stop a run: bash only checks their syntax."""
REPLACED = {
    r"/lus/flare/projects/MyProject|/project/me": "$SITE",  # folders of a site
    r"\w+:(?=\$SITE)": "",  # another machine
    r"snakemake(?= --profile (profiles/slurm|~/\.config/\S+))": "snakemake -n",  # a site's jobs
    # Steps of trainings: fewer ones.
    r'\["40", "20", "10"\]': '["6", "4", "2"]',
    r"train_steps: (400?|300)\b": "train_steps: 8",
    r"train_steps: 44\b": "train_steps: 10",
    r"(?<=evaluation_interval: )(?:20|100)|(?<=save_interval: )20|(?<=global_step)20": "4",
    r"(?<=run.yaml )10(?= 3)": "2",
    r"(tokamake serve .*training)\n": (
        r"\1 > serve.log &\ntrap 'kill $!' EXIT\n"
        r"until grep -q serves serve.log; do sleep 0.1; done\n"
    ),
    r"(python -m http.server (\d+) .*) &\n": (
        r"\1 2> server.log &\ntrap 'kill $!' EXIT\n"
        r"until curl -s -o /dev/null http://127.0.0.1:\2/; do sleep 0.1; done\n"
    ),
    r"(tokamake doctor .*)": r"\1 || [ $? = 1 ]",  # finds faults: this machine is no cluster
}
"""Pattern in a page: what runs instead. `rsync` is a shell function, `_RSYNC`."""

_BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(
    r".*<<'(?P<end>\w+)'.*\n(?:.*\n)*?(?P=end)\n"  # with a here-document
    r"|(?:.*\\\n)*.+\n"
)
_RSYNC = """
rsync() { # of folders on this machine; a source that ends with / means its content
    mkdir -p "${!#}"
    cp "${@/%\\///.}"
}
"""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    """Name of the file that the block shows; empty: it is none."""
    text: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, which is a path in the repository."""
    return [Block(*match) for match in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]


def script(page: str) -> str:
    """Return a page as a shell script.

    Raises:
        AssertionError: it has a block or a command of an unknown kind.
    """
    parts = [part for block in blocks(page) for part in _parts(block, page)]
    text = "\n".join(parts) + "\n"
    for pattern, replacement in REPLACED.items():
        text = re.sub(pattern, replacement, text)
    return text


def _parts(block: Block, page: str) -> list[str]:
    if block.title:
        return [f"cat > {shlex.quote(block.title)} <<'END'\n{block.text}END"]
    if block.language == "python":
        return [f"python - <<'END'\n{block.text}END"]
    if block.language == "text":  # what a command prints
        return []
    assert block.language == "sh", f"{page}: name the language or the file of:\n{block.text}"
    commands = [match[0].rstrip("\n") for match in _COMMAND.finditer(block.text)]
    return [_runnable(command, page) for command in commands]


def _runnable(command: str, page: str) -> str:
    """Return a command, or a line that checks its syntax."""
    kinds = {_kind(part, page) for part in _simple_commands(command)}
    return command if kinds <= {"run"} else f"bash -n <<< {shlex.quote(command)}"


def _kind(command: str, page: str) -> str:
    for kind, known in (("parse", PARSED), ("run", RUN)):
        if any(f"{command} ".startswith(f"{name} ") for name in known):
            return kind
    raise AssertionError(f"{page}: add to RUN or PARSED in {__file__}: {command}")


def _simple_commands(command: str) -> list[str]:
    """Split a command at `&&`, `|` and the like; a here-document is left out."""
    line = command.replace("\\\n", " ").partition("\n")[0]
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("&|;"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [" ".join(part) for part in parts if part]


def run(commands: str, home: Path) -> str:
    """Run a page's script in the clone `home`/tokamake; return what it prints.

    `snakemake` and `tokamake` are forks of servers, see `fork_server`. `home`/site has a site's
    folders.
    """
    environment = {key: value for key, value in os.environ.items() if key != "SNAKEMAKE_PROFILE"}
    folder = Path(sys.executable).parent
    environment |= {
        "PATH": f"{programs('snakemake', 'tokamake')}:{folder}:{environment['PATH']}",
        "HOME": str(home),
    }
    commands = commands.replace("$SITE", str(home / "site"))
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", _RSYNC + commands],
        cwd=home / "tokamake", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def make_clone(home: Path) -> Path:
    """Make a folder that has what pages use of the repository; return it."""
    clone = home / "tokamake"
    clone.mkdir(parents=True)
    (clone / "workflow").symlink_to(ROOT / "workflow")
    for name in ("profiles", "config"):  # pages write there
        shutil.copytree(ROOT / name, clone / name)
    return clone
