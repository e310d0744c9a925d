"""Reads a Snakemake profile, and checks it: files, keys, values of the person.

Its values are as Snakemake takes them; those that are Python expressions are read as such.
"""

import ast
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokamake.doctor.launcher import Launcher, read_launcher
from tokamake.doctor.programs import ask_python
from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.errors import UserError
from tokamake.validation import read_yaml

NAMES = ("profile.yaml", "config.yaml")
NO_CLUSTER = ("local", "dryrun", "touch")
PERSONAL = {
    "pbs": ("account", "queue", "filesystems", "place", "select", "pbs_extra"),
    "sbatch": ("account", "partition", "qos", "constraint", "reservation", "slurm_extra"),
}
"""What executors read of the user's file, for all rules or each."""

_HELP = "import sys; from snakemake.cli import main; main(['--help'])"
_SLURM = {"account": "slurm_account", "partition": "slurm_partition"}
"""What resources of a rule are called on Slurm, where not as in the user's file."""


@dataclass(frozen=True)
class Request:
    """What a rule asks of the scheduler."""

    rule: str
    """Its name, or that of a group; empty: all others."""
    nodes: int
    minutes: float | None
    """None: it is not told, or in words that Snakemake alone reads."""
    queue: str
    """Or partition; empty: the scheduler's own choice."""


@dataclass(frozen=True)
class Profile:
    """Where a workflow runs."""

    path: Path | None
    """Its file; None: no profile."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Its keys."""
    mine: Mapping[str, Any] = field(default_factory=dict)
    """The user's own file."""
    mine_path: Path | None = None
    """Where that is, or would be."""
    launch: Path | None = None
    """The script that starts ranks, from the folder that the workflow runs in."""
    launcher: Launcher = field(default_factory=Launcher)
    """What the script starts them with."""

    @property
    def executor(self) -> str:
        """What runs jobs."""
        return str(self.values.get("executor", "local"))

    @property
    def cluster(self) -> bool:
        """Whether jobs run on other machines."""
        return self.executor not in NO_CLUSTER

    @property
    def scheduler(self) -> str:
        """The batch system that jobs go to: pbs, slurm, or the executor's name."""
        return "slurm" if self.executor == "sbatch" else self.executor

    def personal(self, name: str, rule: str) -> str:
        """What a rule asks for of what differs from person to person; empty: nothing."""
        named = _SLURM.get(name, name) if self.scheduler == "slurm" else name
        own = str(self.values.get("sbatch-defaults") or "").split()
        defaults = dict(part.partition("=")[::2] for part in own)
        mine = (_section(_section(self.mine, "rules"), rule), self.mine, defaults)
        found = (self.resource(named, rule), *(place.get(name) for place in mine))
        return next((str(value) for value in found if value), "")

    def resource(self, name: str, rule: str = "") -> Any:
        """A resource of a rule, as the profile has it; else None."""
        of_rule = _section(_section(self.values, "set-resources"), rule)
        defaults = _section(self.values, "default-resources")
        for place in (of_rule, defaults):
            if name in place and place[name] not in (None, ""):
                return _value(place[name])
        return None

    @property
    def requests(self) -> list[Request]:
        """What each rule of the section set-resources asks for, each group, and all others."""
        section, groups = _section(self.values, "set-resources"), _section(self.values, "groups")
        rules = [rule for rule in section if isinstance(section[rule], dict)]
        alone = [rule for rule in rules if rule not in groups]
        found = [self._request(rule) for rule in [*alone, ""]]
        for name in dict.fromkeys(groups.values()):
            members = [self._request(rule) for rule in groups if groups[rule] == name]
            found.append(self._group(name, members))
        return found

    def _group(self, name: str, members: Sequence[Request]) -> Request:
        """What a group of rules asks for that follow each other."""
        times = [one.minutes for one in members if one.minutes is not None]
        minutes = sum(times) if len(times) == len(members) else None
        return Request(name, max(one.nodes for one in members), minutes, self._queue(name))

    def _request(self, rule: str) -> Request:
        nodes, minutes = self.resource("nodes", rule), self.resource("runtime", rule)
        return Request(rule, int(_number(nodes) or 1), _number(minutes), self._queue(rule))

    def _queue(self, rule: str) -> str:
        return self.personal("partition" if self.scheduler == "slurm" else "queue", rule)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping of a profile, which can also be a list of KEY=VALUE."""
    found = values.get(name) or {}
    if isinstance(found, list):
        return dict(str(one).partition("=")[::2] for one in found)
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _value(text: Any) -> Any:
    """What a resource is: Snakemake takes text for a Python expression where it is one."""
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_profile(folder: Path, directory: Path) -> Profile:
    """Read a profile, its launch script and the user's file.

    Args:
        folder: the profile.
        directory: where the workflow runs.

    Raises:
        UserError: a file is missing or no YAML of the right form.
    """
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder}: no {NAMES[0]} in it; name the folder of a profile")
    values = _mapping(path)
    own = values.get("pbs-user-file") or values.get("sbatch-user-file")
    mine_path = Path(os.path.expandvars(own)).expanduser() if own else None
    mine = _mapping(mine_path) if mine_path and mine_path.is_file() else {}
    launch = _value(_section(values, "default-resources").get("launch"))
    script = directory / str(launch) if launch else None
    launcher = read_launcher(script) if script and script.is_file() else Launcher()
    return Profile(path, values, mine, mine_path, script, launcher)


def _mapping(path: Path) -> dict[str, Any]:
    found = read_yaml(path, "mend it")
    if not isinstance(found or {}, dict):
        raise UserError(f"{path}: no mapping of keys to values; mend it")
    return found or {}


def check_profile(profile: Profile) -> list[Result]:
    """Whether its launch script can be started, and the keys are Snakemake's."""
    assert profile.path is not None
    answer = ask_python(_HELP, seconds=60)
    known = set(re.findall(r"--([a-z][a-z0-9-]+)", answer.output))
    keys = judge_keys(profile, known) if known else None
    unknown = warning("keys of the profile", f"not known: {answer.fault}", "see to snakemake first")
    return [ok("profile", str(profile.path)), judge_launch(profile), keys or unknown]


def judge_launch(profile: Profile) -> Result:
    """Whether ranks can be started at all."""
    name, script, launcher = "launch script", profile.launch, profile.launcher.name
    if script is None:
        remedy = f"add `launch: \"'FOLDER/launch.sh'\"` to default-resources in {profile.path}"
        return wrong(name, "none", remedy)
    if not script.is_file():
        remedy = "paths in a profile count from the folder that Snakemake runs in; start it there"
        return wrong(name, f"{script}: no such file", remedy)
    if not os.access(script, os.X_OK):
        return wrong(name, f"{script}: not executable", f"chmod +x {script}")
    return ok(name, f"{script}{f', {launcher}' * bool(launcher)}")


def judge_keys(profile: Profile, known: Collection[str]) -> Result:
    """Whether each key is an option of Snakemake, or of an executor that is not installed."""
    own = f"{profile.executor}-"
    present = any(option.startswith(own) for option in known)
    strange = [
        key for key in profile.values if key not in known and (present or not key.startswith(own))
    ]
    if not strange:
        return ok("keys of the profile", f"{len(profile.values)}, all known")
    near = difflib.get_close_matches(strange[0], known, 1)
    remedy = f"did you mean {near[0]}?" if near else f"take it out of {profile.path}"
    return wrong("keys of the profile", f"{', '.join(strange)}: unknown to Snakemake", remedy)


def check_personal(profile: Profile) -> list[Result]:
    """Whether account, queue and what else differs from person to person are there."""
    known = PERSONAL.get(profile.executor, ())
    strange = [name for name in profile.mine if name not in (*known, "rules")]
    results = []
    if strange:
        remedy = f"known are {', '.join(known)}, rules"
        results.append(wrong("your file", f"{profile.mine_path}: {strange[0]}: unknown", remedy))
    wanted = str(profile.values.get(f"{profile.executor}-required", ""))
    required = wanted.replace(",", " ").split()
    of_slurm = _SLURM if profile.scheduler == "slurm" else ()
    for name in dict.fromkeys([*required, *of_slurm]):
        value = profile.personal(name, "train")
        if value or name not in required:
            results.append(ok(name, value or "none given, so Slurm's default for you"))
        else:
            results.append(wrong(name, "none", f"write `{name}: ...` into {profile.mine_path}"))
    return results
