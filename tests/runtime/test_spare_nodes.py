"""Spare nodes: which hosts of a job the ranks use after hosts are lost."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokamake.errors import FAULTY_HOSTS_VARIABLE
from tokamake.runtime.spare_nodes import SpareNodes, find_spare_nodes, hosts_of_job

LAUNCH = """\
#!/bin/sh
# Writes down its hosts; fails or hangs if one of them is lost, else runs the command.
cd {folder}
shift 2
hosts=$(paste -sd ' ' "$TOKAMAKE_HOSTFILE")
echo "$hosts: $*" >> calls
for host in $hosts; do
    [ ! -e "$host.hangs" ] || {{ echo $$ > "$host.pid"; sleep 600; }}
    [ ! -e "$host.lost" ] || exit 9
done
exec "$@"
"""
RANKS = """\
echo >> starts
[ ! -e dying ] || {{ rm dying; touch {lost}; exit 137; }}
"""
"""Ranks that lose hosts at their first start."""


class Job:
    """A job with some hosts, in a folder with a launch script.

    Args:
        folder: the folder.
        hosts: names of the hosts.
    """

    def __init__(self, folder: Path, *hosts: str) -> None:
        self.folder, self.hosts = folder, hosts
        (folder / "nodefile").write_text("".join(f"{host}\n" * 2 for host in hosts))
        (folder / "hosts").mkdir()
        self.launch = folder / "launch.sh"
        self.launch.write_text(LAUNCH.format(folder=folder))
        self.launch.chmod(0o755)

    def nodes(self, needed: int, *, seconds: float = 60.0) -> SpareNodes:
        return SpareNodes(
            str(self.launch), needed, hosts=self.hosts, folder=self.folder / "hosts",
            seconds=seconds,
        )  # fmt: skip

    def lose(self, *hosts: str) -> None:
        """Lose these hosts; all others are whole again."""
        for path in self.folder.glob("*.lost"):
            path.unlink()
        for host in hosts:
            (self.folder / f"{host}.lost").touch()

    def train(
        self, needed: int, *, lost: str, restarts: int = 3
    ) -> subprocess.CompletedProcess[str]:
        """Run ranks that die once, when hosts are lost, with restarts."""
        (self.folder / "dying").touch()
        script = RANKS.format(lost=lost)
        command = [sys.executable, "-m", "tokamake.runtime.restarts", str(restarts)]
        ranks = [str(self.launch), str(needed), "2", "sh", "-c", script]
        return subprocess.run(
            [*command, f"{self.folder}/output", *ranks],
            env={**os.environ, "PBS_NODEFILE": f"{self.folder}/nodefile"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    @property
    def starts(self) -> list[str]:
        """Hosts of the starts of ranks."""
        calls = (self.folder / "calls").read_text().splitlines()
        return [call.partition(":")[0] for call in calls if ": sh -c" in call]


def test_ranks_restart_on_a_spare_node_in_place_of_a_lost_one(tmp_path: Path) -> None:
    job = Job(tmp_path, "a", "b", "c")
    done = job.train(2, lost="b.lost")
    assert done.returncode == 0, done.stderr
    assert job.starts == ["a b", "a c"]
    assert done.stderr.splitlines()[-1] == "tokamake: b does not answer; continues on a, c"


def test_too_few_nodes_end_the_job_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTY_HOSTS_VARIABLE, str(tmp_path / "faulty"))
    job = Job(tmp_path, "a", "b", "c")
    done = job.train(2, lost="b.lost c.lost")
    assert done.returncode == 137
    assert job.starts == ["a b"]
    line = "tokamake: b, c do not answer; 1 of 3 nodes left, ranks need 2: no restart in this job"
    assert done.stderr.splitlines()[-1] == line
    assert (tmp_path / "faulty").read_text() == "b\nc\n"  # the next job does not use them


def test_without_spare_nodes_no_host_is_checked(tmp_path: Path) -> None:
    job = Job(tmp_path, "a", "b")
    hosts = job.launch.read_text().replace('"$TOKAMAKE_HOSTFILE"', "nodefile")
    job.launch.write_text(hosts)
    done = job.train(2, lost="b.lost", restarts=1)
    assert done.returncode == 9  # of the launcher, which cannot reach the lost host
    assert "does not answer" not in done.stderr
    assert job.starts == ["a a b b"] * 2
    assert ": true" not in (tmp_path / "calls").read_text()


def test_hosts_that_ranks_used_before_are_preferred(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, "a", "b", "c", "d")
    nodes = job.nodes(2)
    assert nodes.used == ["a", "b"]
    for lost, used in (("", "ab"), ("cd", "ab"), ("a", "bc"), ("", "bc"), ("bd", "ac")):
        job.lose(*lost)
        assert nodes.replace_lost()
        assert nodes.used == list(used)
        chosen = Path(nodes.variables["TOKAMAKE_HOSTFILE"]).read_text()
        assert chosen == "".join(f"{host}\n" for host in used)
    assert capsys.readouterr().err.splitlines() == [
        "tokamake: c, d do not answer; continues on a, b",
        "tokamake: a does not answer; continues on b, c",
        "tokamake: b, d do not answer; continues on a, c",
    ]


def test_a_host_that_hangs_is_left_out_and_its_launcher_ends(tmp_path: Path) -> None:
    job = Job(tmp_path, "a", "b", "c")
    (tmp_path / "b.hangs").touch()
    nodes = job.nodes(2, seconds=3.0)
    begin = time.monotonic()
    assert nodes.replace_lost()
    assert time.monotonic() - begin < 60
    assert nodes.used == ["a", "c"]
    launcher = int((tmp_path / "b.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(launcher, 0)


def test_all_hosts_are_checked_at_the_same_time(tmp_path: Path) -> None:
    hosts = [f"h{number}" for number in range(12)]
    job = Job(tmp_path, *hosts)
    wait = f"until [ $(wc -l < {tmp_path}/calls) = {len(hosts)} ]; do sleep 0.1; done\nexec"
    job.launch.write_text(job.launch.read_text().replace("exec", wait))
    nodes = job.nodes(11)
    assert nodes.replace_lost()
    assert nodes.used == hosts[:11]


def test_a_message_names_a_few_of_many_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, *"abcdefghijkl")
    job.lose("a")
    assert job.nodes(11).replace_lost()
    assert "continues on b, c, d, e, f, g, h, i and 3 more\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "has_spare_nodes"),
    [
        (["launch.sh", "2", "8", "tokamake"], True),
        (["launch.sh", "3", "8", "tokamake"], False),
        (["launch.sh", "4", "8", "tokamake"], False),
        (["sh", "-c", "true"], False),
    ],
)
def test_only_a_job_with_more_nodes_than_ranks_need_has_spare_nodes(
    tmp_path: Path, command: list[str], has_spare_nodes: bool
) -> None:
    job = {"SLURM_JOB_NODELIST": "n[1-3]"}
    assert bool(find_spare_nodes(command, job, folder=tmp_path)) == has_spare_nodes
    assert find_spare_nodes(command, {}, folder=tmp_path) is None


def test_hosts_of_a_job_are_those_that_the_batch_system_names(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("x1.cm\nx1.cm\nx0.cm\n")
    assert hosts_of_job({"PBS_NODEFILE": f"{tmp_path}/nodes"}) == ["x1.cm", "x0.cm"]
    assert hosts_of_job({"PBS_NODEFILE": f"{tmp_path}/none"}) == []
    assert hosts_of_job({"SLURM_JOB_NODELIST": "n[01-02],m"}) == ["n01", "n02", "m"]
    assert hosts_of_job({}) == []
