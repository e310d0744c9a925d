"""Read a Snakemake profile and check it: files, keys, personal values.

Snakemake evaluates text values as Python expressions; this module does so for literals.
"""

import ast
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tokamake.config_files import read_yaml
from tokamake.doctor.find_profile import REPOSITORY
from tokamake.doctor.launcher import Launcher, read_launcher
from tokamake.doctor.programs import ask_python
from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.errors import UserError

NAMES = ("profile.yaml", "config.yaml")
NO_CLUSTER = ("local", "dryrun", "touch")

_HELP = "import sys; from snakemake.cli import main; main(['--help'])"
_SLURM = {"account": "slurm_account", "partition": "slurm_partition"}
"""Key of the user's file → resource of Slurm, if the names differ."""


@dataclass(frozen=True)
class ResourceRequest:
    """Resources that a rule requests from the scheduler."""

    rule: str
    """Name of the rule or group; empty: all other rules."""
    nodes: int
    minutes: float | None
    """None: not set, or in a form that only Snakemake can read."""
    queue: str
    """Queue or partition; empty: the default of the scheduler."""


@dataclass(frozen=True)
class Profile:
    """A profile with the user's own file and the launch script."""

    path: Path | None
    """File of the profile; None: no profile."""
    values: Mapping[str, Any] = field(default_factory=dict)
    user_values: Mapping[str, Any] = field(default_factory=dict)
    user_path: Path | None = None
    """Path of the user's file, which need not exist."""
    launch: Path | None = None
    """Launch script, relative to the working directory of the workflow."""
    launcher: Launcher = field(default_factory=Launcher)

    @property
    def executor(self) -> str:
        return str(self.values.get("executor", "local"))

    @property
    def cluster(self) -> bool:
        """Whether jobs run on other machines."""
        return self.executor not in NO_CLUSTER

    @property
    def scheduler(self) -> str:
        """Batch system: pbs, slurm, or the name of the executor."""
        return "slurm" if self.executor == "sbatch" else self.executor

    def personal(self, name: str, rule: str) -> str:
        """Personal value of a rule, for example its account; empty if there is none."""
        resource = _SLURM.get(name, name) if self.scheduler == "slurm" else name
        options = str(self.values.get("sbatch-defaults") or "").split()
        defaults = dict(option.partition("=")[::2] for option in options)
        # The executors have the same order of precedence.
        places = (_section(_section(self.user_values, "rules"), rule), self.user_values, defaults)
        values = (self.resource(resource, rule), *(place.get(name) for place in places))
        return next((str(value) for value in values if value), "")

    def resource(self, name: str, rule: str = "") -> Any:
        """Resource of a rule in the profile; None if there is none."""
        rule_resources = _section(_section(self.values, "set-resources"), rule)
        defaults = _section(self.values, "default-resources")
        for place in (rule_resources, defaults):
            if name in place and place[name] not in (None, ""):
                return _value(place[name])
        return None

    @property
    def requests(self) -> list[ResourceRequest]:
        """Requests of each rule in set-resources, of each group, and of all other rules."""
        section, groups = _section(self.values, "set-resources"), _section(self.values, "groups")
        rules = [rule for rule in section if isinstance(section[rule], dict)]
        ungrouped = [rule for rule in rules if rule not in groups]
        requests = [self._request(rule) for rule in [*ungrouped, ""]]
        for name in dict.fromkeys(groups.values()):
            members = [self._request(rule) for rule in groups if groups[rule] == name]
            requests.append(self._group(name, members))
        return requests

    def _group(self, name: str, members: Sequence[ResourceRequest]) -> ResourceRequest:
        """Request of a group: rules run one after the other in one job."""
        times = [member.minutes for member in members if member.minutes is not None]
        minutes = sum(times) if len(times) == len(members) else None
        return ResourceRequest(
            name, max(member.nodes for member in members), minutes, self._queue(name)
        )

    def _request(self, rule: str) -> ResourceRequest:
        nodes, spare = (_number(self.resource(name, rule)) for name in ("nodes", "spare_nodes"))
        minutes = _number(self.resource("runtime", rule))
        return ResourceRequest(rule, int((nodes or 1) + (spare or 0)), minutes, self._queue(rule))

    def _queue(self, rule: str) -> str:
        return self.personal("partition" if self.scheduler == "slurm" else "queue", rule)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a profile: a mapping or a list of KEY=VALUE."""
    section = values.get(name) or {}
    if isinstance(section, list):
        return dict(str(item).partition("=")[::2] for item in section)
    return section if isinstance(section, dict) else {}


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _value(text: Any) -> Any:
    """Evaluate text that is a Python literal, as Snakemake does."""
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_profile(folder: Path, directory: Path) -> Profile:
    """Read a profile, its launch script and the user's file."""
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        fault = f"no {NAMES[0]} in it" if folder.is_dir() else "no such folder"
        siblings = sorted(str(file.parent) for file in folder.parent.glob(f"*/{NAMES[0]}"))
        close = difflib.get_close_matches(str(folder), siblings, 1)
        choices = f", such as {', '.join(siblings)}" if siblings else ""
        remedy = f"did you mean {close[0]}?" if close else f"give the folder of a profile{choices}"
        raise UserError(f"{folder}: {fault}; {remedy}")
    values = _mapping(path)
    user_file = values.get("pbs-user-file") or values.get("sbatch-user-file")
    user_path = Path(os.path.expandvars(user_file)).expanduser() if user_file else None
    user_values = _mapping(user_path) if user_path and user_path.is_file() else {}
    launch = _value(_section(values, "default-resources").get("launch"))
    script = directory / str(launch) if launch else None
    if script and not script.is_file() and (own := REPOSITORY / str(launch)).is_file():
        script = own  # as the workflow finds it from a folder outside the clone
    launcher = read_launcher(script) if script and script.is_file() else Launcher()
    return Profile(path, values, user_values, user_path, script, launcher)


def _mapping(path: Path) -> dict[str, Any]:
    values = read_yaml(path, "fix it")
    if not isinstance(values or {}, dict):
        raise UserError(f"{path}: not a mapping of keys to values; fix it")
    return values or {}


def check_profile(profile: Profile) -> list[Result]:
    """Check the launch script, and that Snakemake knows all keys."""
    assert profile.path is not None
    answer = ask_python(_HELP, seconds=60)
    known = set(re.findall(r"--([a-z][a-z0-9-]+)", answer.output))
    keys = keys_result(profile, known) if known else None
    fault = warning("keys of the profile", f"not known: {answer.fault}", "fix snakemake first")
    return [ok("profile", str(profile.path)), launch_result(profile), keys or fault]


def launch_result(profile: Profile) -> Result:
    """Check that the launch script exists and is executable."""
    name, script, launcher = "launch script", profile.launch, profile.launcher.name
    if script is None:
        remedy = f"add `launch: \"'FOLDER/launch.sh'\"` to default-resources in {profile.path}"
        return wrong(name, "none", remedy)
    if not script.is_file():
        remedy = "paths in a profile are relative to Snakemake's working directory; start it there"
        return wrong(name, f"{script}: no such file", remedy)
    if not os.access(script, os.X_OK):
        return wrong(name, f"{script}: not executable", f"chmod +x {script}")
    return ok(name, f"{script}{f', {launcher}' * bool(launcher)}")


def keys_result(profile: Profile, known: Collection[str]) -> Result:
    """Check that each key is an option of Snakemake or of an executor that is not installed."""
    prefix = f"{profile.executor}-"
    # `snakemake --help` lists the options of installed executors only.
    installed = any(option.startswith(prefix) for option in known)
    unknown = [
        key
        for key in profile.values
        if key not in known and (installed or not key.startswith(prefix))
    ]
    if not unknown:
        return ok("keys of the profile", f"{len(profile.values)}, all known")
    close = difflib.get_close_matches(unknown[0], known, 1)
    remedy = f"did you mean {close[0]}?" if close else f"remove it from {profile.path}"
    return wrong("keys of the profile", f"{', '.join(unknown)}: unknown to Snakemake", remedy)


def check_personal(profile: Profile) -> list[Result]:
    """Check that the user's file has the account, the queue and other required personal values."""
    known = _personal_keys(profile.executor)
    results = []
    if unknown := [name for name in profile.user_values if known and name not in known]:
        remedy = f"valid keys are {', '.join(known)}"
        results.append(wrong("your file", f"{profile.user_path}: {unknown[0]}: unknown", remedy))
    text = str(profile.values.get(f"{profile.executor}-required", ""))
    required = text.replace(",", " ").split()
    optional = _SLURM if profile.scheduler == "slurm" else ()
    for name in dict.fromkeys([*required, *optional]):
        value = profile.personal(name, "train")
        if value and name in ("queue", "partition"):
            value = f"{value} in your file"  # the checks of the scheduler compare it
        if value or name not in required:
            results.append(ok(name, value or "none, so Slurm uses your default"))
        else:
            results.append(wrong(name, "none", f"add `{name}: ...` to {profile.user_path}"))
    return results


def _personal_keys(executor: str) -> list[str]:
    """Keys of the user's file that an executor knows; empty if it is not installed here."""
    try:
        request = import_module(f"snakemake_executor_plugin_{executor}.request")
        return [*request.PERSONAL, "rules"]
    except (ImportError, AttributeError):
        return []
