"""Checks of a profile and of a user's file."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs import request as pbs_request
from snakemake_executor_plugin_sbatch import request as sbatch_request
from tests.doctor.conftest import QUEUES, read, states
from tokamake.doctor import profile, scheduler
from tokamake.doctor.profile import ResourceRequest
from tokamake.errors import UserError


def test_a_valid_profile_has_no_faults(site: Path) -> None:
    valid = read(site)
    assert valid.launcher.name == "mpiexec"
    assert set(states(profile.check_profile(valid)).values()) == {"ok"}
    assert [result.line for result in profile.check_personal(valid)] == [
        "ok       account: proj",
        "ok       queue: debug in your file",
    ]
    assert valid.requests == [
        ResourceRequest("train", 2, 60, "debug"),
        ResourceRequest("", 1, 60, "debug"),
    ]


def test_values_for_a_rule_override_values_for_all_rules(site: Path) -> None:
    (site / "mine.yaml").write_text("account: a\nqueue: q\nrules: {train: {queue: prod}}\n")
    assert [request.queue for request in read(site).requests] == ["prod", "q"]


def test_a_profile_is_read_as_the_executors_read_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, keys in (("pbs", pbs_request.PERSONAL), ("sbatch", sbatch_request.PERSONAL)):
        assert profile._personal_keys(name) == [*keys, "rules"]
    assert profile._personal_keys("local") == []
    monkeypatch.setenv("MINE", str(site))
    path = site / "site/profile.yaml"
    text = path.read_text().replace(f"pbs-user-file: {site}", "pbs-user-file: $MINE")
    path.write_text(text.replace("account queue", "account,queue"))
    assert [result.line for result in profile.check_personal(read(site))] == [
        "ok       account: proj",
        "ok       queue: debug in your file",
    ]


def test_a_group_requests_the_sum_of_the_times(site: Path) -> None:
    path = site / "site/profile.yaml"
    text = path.read_text().replace("set-resources:", "set-resources:\n  weigh: {runtime: 10}")
    path.write_text(text + "groups: {describe: prepare, weigh: prepare}\n")
    (site / "mine.yaml").write_text("account: a\nqueue: q\nrules: {prepare: {queue: prod}}\n")
    assert read(site).requests[1:] == [
        ResourceRequest("", 1, 60, "q"),
        ResourceRequest("prepare", 1, 70, "prod"),
    ]


def test_spare_nodes_are_requested_too(site: Path) -> None:
    path = site / "site/profile.yaml"
    path.write_text(path.read_text().replace("train: {", "train: {spare_nodes: 2, "))
    assert read(site).requests[0].nodes == 4


def test_mistakes_in_a_profile_are_reported(site: Path) -> None:
    path, script = site / "site/profile.yaml", site / "site/launch.sh"
    path.write_text(path.read_text() + "latency-wiat: 5\n")
    result = profile.keys_result(read(site), {"executor", "jobs", "latency-wait"})
    assert result.state == "wrong"
    known = set(read(site).values) - {"latency-wiat"} | {"latency-wait"}
    result = profile.keys_result(read(site), known)
    assert result.line == (
        "wrong    keys of the profile: latency-wiat: unknown to Snakemake "
        "(did you mean latency-wait?)"
    )
    # Snakemake does not list the options of an executor that is not installed.
    missing = {key for key in known if not key.startswith("pbs-")}
    assert profile.keys_result(read(site), missing).value == "latency-wiat: unknown to Snakemake"
    script.chmod(0o644)
    assert f"{script}: not executable (chmod +x" in profile.launch_result(read(site)).line
    script.unlink()
    assert "no such file" in profile.launch_result(read(site)).value
    path.write_text("executor: pbs\n")
    assert profile.launch_result(read(site)).value == "none"
    path.write_text("- executor\n")
    with pytest.raises(UserError, match="not a mapping of keys"):
        read(site)
    with pytest.raises(UserError, match=r"sit: no such folder; did you mean .*/site\?"):
        profile.read_profile(site / "sit", site)
    with pytest.raises(UserError, match="xyz: no such folder; give the folder of a profile"):
        profile.read_profile(site / "none/xyz", site)
    (site / "none").mkdir()
    with pytest.raises(UserError, match=r"none: no profile\.yaml in it; did you mean"):
        profile.read_profile(site / "none", site)


def test_values_that_the_doctor_cannot_read_are_not_known(site: Path) -> None:
    (site / "mine.yaml").write_text("rules: [train]\nqueue: debug\n")
    path = site / "site/profile.yaml"
    path.write_text(path.read_text().replace("runtime: 60}", "runtime: 2h}"))
    assert read(site).requests[0] == ResourceRequest("train", 2, None, "debug")
    result = scheduler.request_result(read(site).requests[0], QUEUES)
    assert result.value.startswith("2 nodes, time not known in debug; ")


def test_personal_values_that_are_missing(site: Path) -> None:
    (site / "mine.yaml").write_text("acount: proj\nqueue: debug\n")
    results = profile.check_personal(read(site))
    assert states(results) == {"your file": "wrong", "account": "wrong", "queue": "ok"}
    assert f"add `account: ...` to {site}/mine.yaml" in results[1].remedy


def test_missing_personal_values_are_reported_on_slurm(site: Path) -> None:
    start = f"executor: sbatch\nsbatch-user-file: {site}/mine.yaml\nsbatch-required: account qos\n"
    (site / "site/profile.yaml").write_text(start)
    (site / "mine.yaml").write_text("qos: debug\nqueue: short\n")
    lines = {result.name: result.line for result in profile.check_personal(read(site))}
    assert lines["your file"].startswith(f"wrong    your file: {site}/mine.yaml: queue: unknown")
    assert f"add `account: ...` to {site}/mine.yaml" in lines["account"]
    assert lines["qos"] == "ok       qos: debug"
    assert lines["partition"] == "ok       partition: none, so Slurm uses your default"
    (site / "site/profile.yaml").write_text(
        f"{start}set-resources:\n  train: {{slurm_account: arts}}\n"
    )
    assert {result.name: result.line for result in profile.check_personal(read(site))}[
        "account"
    ] == ("ok       account: arts")
