"""What a job's resources and the user's file become as options of qsub."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.errors import UserError
from snakemake_executor_plugin_pbs.request import (
    UserFile,
    build_request,
    job_name,
    misspelt_rules,
    queue_limits,
    read_user_file,
    required_names,
)

NOBODY = UserFile(Path("me.yaml"), {}, {})


def options(resources: dict, user: UserFile = NOBODY) -> str:
    return " ".join(build_request("train", 4, resources, user).arguments)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, "-l select=1:ncpus=4"),
        (
            {"nodes": 2, "ncpus": 32, "ngpus": 4, "mem_mb": 8000, "place": "scatter:excl"},
            "-l select=2:ncpus=32:ngpus=4:mem=8000mb -l place=scatter:excl",
        ),
        ({"runtime": 90}, "-l select=1:ncpus=4 -l walltime=01:30:00"),
        ({"runtime": 6000.5}, "-l select=1:ncpus=4 -l walltime=100:00:30"),
        (
            {"queue": "prod", "account": "P", "filesystems": "home:flare"},
            "-q prod -A P -l select=1:ncpus=4 -l filesystems=home:flare",
        ),
        ({"nodes": 3, "select": "{nodes}:system=polaris"}, "-l select=3:system=polaris"),
        ({"pbs_extra": "-m n -W umask=022"}, "-l select=1:ncpus=4 -m n -W umask=022"),
    ],
)
def test_options_of_qsub(resources: dict, expected: str) -> None:
    assert options(resources) == expected


def test_the_walltime_is_known_in_seconds() -> None:
    assert build_request("train", 4, {"runtime": 6000.5}, NOBODY).seconds == 360_030
    assert build_request("train", 4, {}, NOBODY).seconds is None


def test_a_job_comes_before_its_rule_and_a_rule_before_all(tmp_path: Path) -> None:
    path = tmp_path / "me.yaml"
    path.write_text("account: A\nqueue: all\nrules:\n  train:\n    queue: mine\n")
    user = read_user_file(path)
    assert options({}, user).startswith("-q mine -A A ")
    assert options({"queue": "job"}, user).startswith("-q job -A A ")
    other = build_request("merge", 1, {}, user)
    assert other.queue == "all"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("acount: A\n", "acount: unknown; known are account"),
        ("- account\n", "no mapping"),
        ("account: [a]\n", "must be a text"),
        ("rules: [train]\n", "rules: no mapping"),
        ("rules: {train: prod}\n", "rules: train: 'prod'"),
        ("rules: {train: {q: prod}}\n", "rules: train: q: unknown"),
        ("a: : b\n", "no YAML"),
    ],
)
def test_mistakes_in_the_users_file(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "me.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        read_user_file(path)


def test_a_users_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_user_file(tmp_path)
    path = tmp_path / "me.yaml"
    path.write_bytes("account: Münster\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"me.yaml: is not UTF-8"):
        read_user_file(path)


def test_misspelt_rules_of_the_users_file_are_told(tmp_path: Path) -> None:
    path = tmp_path / "me.yaml"
    path.write_text(
        "rules: {trian: {queue: prod}, elsewhere: {queue: prod}, train: {queue: prod}}\n"
    )
    told = misspelt_rules(read_user_file(path), {"train", "tokenize", "prepare"})
    assert told == [f"{path}: rules: trian: no rule or group is called so; did you mean train?"]


def test_what_a_site_insists_on() -> None:
    assert required_names("account, queue filesystems") == ("account", "queue", "filesystems")
    with pytest.raises(UserError, match="required: 'acount': unknown; known are account"):
        required_names("acount queue")


def test_no_users_file_says_nothing(tmp_path: Path) -> None:
    assert read_user_file(tmp_path / "none.yaml").common == {}


@pytest.mark.parametrize(
    ("resources", "match"),
    [
        ({"nodes": 0}, "nodes: 0"),
        ({"ncpus": "many"}, "ncpus: 'many'"),
        ({"runtime": 0}, "runtime: 0"),
        ({"runtime": "1h?"}, "runtime: '1h\\?'"),
        ({"select": "{nods}"}, "cannot be filled in; known are {nodes}"),
        ({"select": "{nodes"}, "cannot be filled in"),
        ({"pbs_extra": "-J 0-9"}, "-J: the executor sets this itself"),
        ({"pbs_extra": "-Nname"}, "-Nname: the executor sets this itself"),
        ({"pbs_extra": "'open"}, "No closing quotation"),
    ],
)
def test_mistakes_in_resources(resources: dict, match: str) -> None:
    with pytest.raises(UserError, match=match):
        options(resources)


def test_names_are_readable_and_end_with_the_token() -> None:
    assert job_name("tokenize", {"batch": "web/0 1"}, "abc") == "tokenize-web_0_1.abc"
    long = job_name("9rule", {"x": "y" * 500}, "abc")
    assert long.startswith("j9rule-yyy")
    assert long.endswith("y.abc")
    assert len(long) == 200


def test_limits_of_queues() -> None:
    assert queue_limits("debug=1 prod=20, *=5") == {"debug": 1, "prod": 20, "*": 5}
    assert queue_limits("7") == {"*": 7}
    assert queue_limits("") == {}
    for text in ("debug=", "debug=x", "=3", "debug=0", "x"):
        with pytest.raises(UserError, match="max-queued: "):
            queue_limits(text)
