"""What the start of a workflow says about downloads; workflows with addresses are tested beside."""

import re
from pathlib import Path

import pytest

from tests.support.web_server import Server
from tests.test_house import commands, rules
from tokamake.cli import ONLINE
from tokamake.remote.addresses import RemoteFile
from tokamake.remote.download import download, list_files
from tokamake.workflow.startup import report_downloads


@pytest.mark.parametrize("rule", ["fetch", "fetch_weights", "push"])
def test_rules_that_need_a_network_run_where_snakemake_runs(rule: str) -> None:
    """Compute nodes have none."""
    assert re.search(r"^\s+localrule: True\b", rules()[rule], re.MULTILINE)
    assert re.search(r"tokamake (fetch|fetch-batch|push) ", rules()[rule])


def test_no_other_rule_may_use_the_network() -> None:
    online = {name for name, command in commands().items() if command in ONLINE - {"train"}}
    assert online == {"fetch", "fetch_task", "fetch_weights", "push"}


def files(number: int) -> list[RemoteFile]:
    return [
        RemoteFile(f"https://host/{n}", f"results/raw/https/host/{n}", 1000, "")
        for n in range(number)
    ]


def test_the_number_and_size_of_the_files_and_the_cache_are_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_downloads([])
    report_downloads(files(5))
    assert capsys.readouterr().err == (
        f"tokamake: 5 files behind addresses, 5.0 kB, to be downloaded to {tmp_path / 'cache'}\n"
    )


def test_offline_what_is_not_in_the_cache_is_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server.files["/a.jsonl"] = b"text"
    server.repositories["datasets/org/texts"] = {"b.jsonl": b"text"}
    cached = [*list_files(f"{server.url}/a.jsonl"), *list_files("hf://datasets/org/texts/b.jsonl")]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report_downloads(cached)
    assert f"{server.url}/a.jsonl, hf://datasets/org/texts@" in capsys.readouterr().err
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for file in cached:
        download(file)
        Path(file.path).unlink()  # a job links it again
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report_downloads(cached)
    assert capsys.readouterr().err == ""
    report_downloads([*cached, *files(5)])
    assert capsys.readouterr().err == (
        f"tokamake: 5 files behind addresses, 5.0 kB, not in {tmp_path / 'cache'}, and "
        "HF_HUB_OFFLINE is set: https://host/0, https://host/1, https://host/2 and 2 more; start "
        "once on a node with a network, without HF_HUB_OFFLINE\n"
    )
