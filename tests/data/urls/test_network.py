"""An outage of the network differs from hosts that do not answer."""

from threading import Event

import pytest

from tokamake.data.urls.network import HOSTS_IN_A_ROW, Network
from tokamake.errors import TemporaryError


class NoWait(Event):
    """An event that notes the time that it should wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0)
        return False


class Hosts:
    """Hosts that answer after some requests."""

    def __init__(self, silent_requests: int) -> None:
        self.silent, self.asked = silent_requests, list[str]()

    def answer(self, url: str) -> bool:
        self.asked.append(url)
        return len(self.asked) > self.silent


def network(hosts: Hosts, *, waits: NoWait, max_wait_seconds: float = 0) -> Network:
    made = Network(hosts.answer, max_wait_seconds=max_wait_seconds, stopped=waits)
    made.begin("0.warc.gz", ["http://other.org/"])
    return made


def fail(made: Network, num_hosts: int) -> None:
    for number in range(num_hosts):
        made.note_failure(f"http://{number}.org/", "no connection")


def test_hosts_that_answered_before_decide() -> None:
    hosts = Hosts(0)
    made = network(hosts, waits=NoWait())
    made.note_answer("http://good.org/page")
    fail(made, HOSTS_IN_A_ROW - 1)
    assert not hosts.asked
    fail(made, HOSTS_IN_A_ROW)
    assert hosts.asked == ["http://good.org/page"]
    made.check()  # no failure since
    assert len(hosts.asked) == 1


def test_an_answer_between_failures_is_proof() -> None:
    hosts = Hosts(9)
    made = network(hosts, waits=NoWait())
    for _ in range(5):
        fail(made, HOSTS_IN_A_ROW - 1)
        made.note_answer("http://good.org/page")
    made.check()
    assert not hosts.asked


def test_many_failures_of_one_host_are_no_outage() -> None:
    hosts = Hosts(9)
    made = network(hosts, waits=NoWait())
    for _ in range(100):
        made.note_failure("http://dead.org/page", "no such host")
    assert not hosts.asked


def test_without_any_answer_the_network_is_down_for_all_threads() -> None:
    hosts = Hosts(99)
    made = network(hosts, waits=NoWait())
    made.note_answer("http://good.org/page")
    fail(made, HOSTS_IN_A_ROW - 1)
    for _ in range(2):
        with pytest.raises(
            TemporaryError,
            match=r"^0.warc.gz: the network of this machine seems to be down: no host answers "
            r"\(most: no connection\); check network, name service and http_proxy, and run again",
        ):
            made.check()
    assert hosts.asked == ["http://good.org/page", "http://other.org/"]


def test_a_short_outage_is_waited_for() -> None:
    hosts, waits = Hosts(3), NoWait()
    made = network(hosts, waits=waits, max_wait_seconds=60)
    fail(made, HOSTS_IN_A_ROW)
    assert waits.waits == [1, 2, 4]
    assert len(hosts.asked) == 4
