"""The user file: its values, errors in it, and one message for missing values before any job."""

import subprocess
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs import ExecutorSettings
from snakemake_executor_plugin_pbs.base.errors import UserError
from snakemake_executor_plugin_pbs.base.settings import BatchSettings
from snakemake_executor_plugin_pbs.base.user_file import (
    UserFile,
    has_value,
    missing_values,
    misspelled_rules,
    read_user_file,
    read_values,
    required_names,
)
from snakemake_executor_plugin_pbs.request import PERSONAL
from snakemake_executor_plugin_sbatch import ExecutorSettings as SlurmSettings
from tests.support.paths import ROOT
from tests.support.snakemake_server import start

NO_VALUES = UserFile(Path("me.yaml"), {}, {})
REQUIRED = ExecutorSettings(required="account queue")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("acount: A\n", "acount: unknown; known are account"),
        ("- account\n", "is not a mapping"),
        ("account: [a]\n", "must be a string"),
        ("rules: [train]\n", "rules: is not a mapping"),
        ("rules: {train: prod}\n", "rules: train: 'prod'"),
        ("rules: {train: {q: prod}}\n", "rules: train: q: unknown"),
        ("a: : b\n", "is not YAML"),
    ],
)
def test_errors_in_the_user_file(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "me.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        read_user_file(path, PERSONAL)


def test_an_unreadable_user_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_user_file(tmp_path, PERSONAL)
    path = tmp_path / "me.yaml"
    path.write_bytes("account: Münster\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"me.yaml: is not UTF-8"):
        read_user_file(path, PERSONAL)


def test_misspelled_rules_of_the_user_file_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "me.yaml"
    path.write_text(
        "rules: {trian: {queue: prod}, elsewhere: {queue: prod}, train: {queue: prod}}\n"
    )
    warnings = misspelled_rules(read_user_file(path, PERSONAL), {"train", "tokenize", "prepare"})
    message = f"{path}: rules: trian: no rule or group has this name; did you mean train?"
    assert warnings == [message]


def test_required_names_are_parsed() -> None:
    names = ("account", "queue", "filesystems")
    assert required_names("account, queue filesystems", PERSONAL) == names
    with pytest.raises(UserError, match="required: 'acount': unknown; known are account"):
        required_names("acount queue", PERSONAL)


def test_a_missing_user_file_has_no_values(tmp_path: Path) -> None:
    assert read_user_file(tmp_path / "none.yaml", PERSONAL).common == {}


def test_all_missing_values_are_one_message_with_the_remedy() -> None:
    message = missing_values(REQUIRED, NO_VALUES, jobs=[("train", {}), ("merge", {})])
    assert message == (
        "me.yaml: no account, queue, which this site requires; write `account: ...` and "
        "`queue: ...` into that file, at the top for all jobs or below `rules:` and the name of a "
        "rule or group"
    )


def test_jobs_are_named_if_only_some_lack_a_value() -> None:
    user = UserFile(Path("me.yaml"), {"account": "A"}, {"prepare": {"queue": "q"}})
    jobs = [("prepare", {}), ("train", {}), ("merge", {"queue": "m"}), ("index", {})]
    assert "no queue for index, train, which" in missing_values(REQUIRED, user, jobs=jobs)
    assert missing_values(REQUIRED, user, jobs=jobs[::2]) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("container: a.sif\n", True),
        ("rules: {train: {container: a.sif}}\n", True),
        ("account: A\n", False),
        ("container: ''\n", False),
    ],
)
def test_a_value_for_any_rule_counts(
    text: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "me.yaml").write_text(text)
    settings = ExecutorSettings(user_file=str(tmp_path / "me.yaml"))
    monkeypatch.setattr(BatchSettings, "current", settings)
    assert has_value("container") is expected
    monkeypatch.setattr(BatchSettings, "current", None)  # another executor
    assert not has_value("container")


def test_resources_of_slurm_have_their_own_names() -> None:
    settings = SlurmSettings(required="account partition", defaults="partition=gpu")
    user = read_values(settings)
    assert missing_values(settings, user, jobs=[("train", {"slurm_account": "A"})]) == ""
    assert "no account, which" in missing_values(settings, user, jobs=[("train", {"account": "A"})])


def test_values_of_the_user_replace_those_of_the_site(tmp_path: Path) -> None:
    path = tmp_path / "me.yaml"
    path.write_text("qos: mine\n")
    settings = SlurmSettings(user_file=str(path), defaults="qos=site constraint=gpu")
    assert read_values(settings).common == {"qos": "mine", "constraint": "gpu"}


def test_an_unknown_required_value_is_an_error() -> None:
    with pytest.raises(UserError, match="required: 'acount': unknown"):
        missing_values(ExecutorSettings(required="acount"), NO_VALUES, jobs=[])


def dry_run(folder: Path, text: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Dry run of the whole workflow with the profile of Aurora and a user file."""
    path = folder / "me.yaml"
    if text is not None:
        path.write_text(text)
    for name in ("workflow", "config", "profiles"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    options = ("--profile", "profiles/aurora", "--dry-run", "--pbs-user-file", str(path), "--quiet")
    return start([*options, *arguments, "--", "data"], folder)


@pytest.mark.slow
def test_a_dry_run_names_missing_values(tmp_path: Path) -> None:
    done = dry_run(tmp_path, None)
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("tokamake: "))
    assert message.startswith(
        f"tokamake: {tmp_path}/me.yaml: no account, queue, filesystems, which"
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    done = dry_run(tmp_path, "acount: A\n")
    assert f"tokamake: {tmp_path}/me.yaml: acount: unknown; known are" in done.stderr


@pytest.mark.slow
def test_a_dry_run_knows_rules_groups_and_resources(tmp_path: Path) -> None:
    # The dry run does not know which rules the group contains.
    text = "account: A\nfilesystems: home\nrules:\n  prepare: {queue: q}\n"
    assert dry_run(tmp_path, text).returncode == 0
    text = "account: A\nfilesystems: home\n"
    assert "me.yaml: no queue, which this site requires" in dry_run(tmp_path, text).stderr
    resources = ["launch='profiles/aurora/launch.sh'", "queue=q"]
    assert dry_run(tmp_path, text, "--default-resources", *resources).returncode == 0
