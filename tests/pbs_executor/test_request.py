"""Options of qsub from a job's resources and the user file."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.errors import UserError
from snakemake_executor_plugin_pbs.base.request import job_name, queue_limits
from snakemake_executor_plugin_pbs.base.user_file import UserFile, read_user_file
from snakemake_executor_plugin_pbs.request import PERSONAL, build_request

NO_VALUES = UserFile(Path("me.yaml"), {}, {})


def options(resources: dict, user: UserFile = NO_VALUES) -> str:
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
        ({"nodes": 2, "spare_nodes": 0}, "-l select=2:ncpus=4"),
        (
            {"nodes": 2, "spare_nodes": 1, "select": "{nodes}:system=polaris", "place": "scatter"},
            "-l select=3:system=polaris -l place=scatter -W tolerate_node_failures=all",
        ),
    ],
)
def test_resources_become_options_of_qsub(resources: dict, expected: str) -> None:
    assert options(resources) == expected


def test_the_request_has_the_walltime_in_seconds() -> None:
    assert build_request("train", 4, {"runtime": 6000.5}, NO_VALUES).seconds == 360_030
    assert build_request("train", 4, {}, NO_VALUES).seconds is None


def test_a_job_resource_replaces_the_value_of_its_rule_and_a_rule_that_of_all_rules(
    tmp_path: Path,
) -> None:
    path = tmp_path / "me.yaml"
    path.write_text("account: A\nqueue: all\nrules:\n  train:\n    queue: mine\n")
    user = read_user_file(path, PERSONAL)
    assert options({}, user).startswith("-q mine -A A ")
    assert options({"queue": "job"}, user).startswith("-q job -A A ")
    other = build_request("merge", 1, {}, user)
    assert other.queue == "all"


@pytest.mark.parametrize(
    ("resources", "match"),
    [
        ({"nodes": 0}, "nodes: 0"),
        ({"ncpus": "many"}, "ncpus: 'many'"),
        ({"spare_nodes": -1}, "spare_nodes: -1"),
        ({"spare_nodes": 1, "select": "4"}, "spare_nodes is 1, but {nodes} is missing"),
        ({"runtime": 0}, "runtime: 0"),
        ({"runtime": "1h?"}, "runtime: '1h\\?'"),
        ({"select": "{nods}"}, "is not a valid template; placeholders are {nodes}"),
        ({"select": "{nodes"}, "is not a valid template"),
        ({"pbs_extra": "-J 0-9"}, "-J: the executor sets this itself"),
        ({"pbs_extra": "-Nname"}, "-Nname: the executor sets this itself"),
        ({"pbs_extra": "'open"}, "No closing quotation"),
    ],
)
def test_errors_in_resources(resources: dict, match: str) -> None:
    with pytest.raises(UserError, match=match):
        options(resources)


def test_names_are_readable_and_end_with_the_token() -> None:
    assert job_name("tokenize", {"batch": "web/0 1"}, token="abc") == "tokenize-web_0_1.abc"
    long = job_name("9rule", {"x": "y" * 500}, token="abc")
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
