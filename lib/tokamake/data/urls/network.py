"""Outages of this machine's network: told from servers that do not answer."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Event, Lock
from urllib.parse import urlsplit

from tokamake.errors import TemporaryError

HOSTS_IN_A_ROW = 20
"""Hosts that fail one after the other, none answering between, until other hosts are asked."""
_NUM_ASKED = 4
"""Hosts that answered lately, and may be asked."""


class Network:
    """The network, as the latest requests show it.

    Lists of URLs have many dead hosts. So a row of failures is no outage yet: hosts that have
    answered before are asked again, and decide.
    """

    def __init__(
        self, answers: Callable[[str], bool], *, max_wait_seconds: float, stopped: Event
    ) -> None:
        """`answers` sends a request to the host of a URL; `stopped` ends waits."""
        self._answers, self._max_wait, self._stopped = answers, max_wait_seconds, stopped
        self._subject = ""
        self._others: Sequence[str] = ()
        self._answered: dict[str, str] = {}
        """URL of each host that answered last."""
        self._failures: dict[str, str] = {}
        """Reason of each host that failed since a host has answered."""
        self._lock, self._checking = Lock(), Lock()
        self._error: TemporaryError | None = None

    def begin(self, subject: str, others: Sequence[str]) -> None:
        """Name the file that is fetched, and URLs whose hosts may be asked."""
        self._subject, self._others = subject, others

    def note_answer(self, url: str) -> None:
        host = urlsplit(url).netloc
        with self._lock:
            self._failures.clear()
            self._answered.pop(host, None)
            self._answered[host] = url
            if len(self._answered) > _NUM_ASKED:
                del self._answered[next(iter(self._answered))]

    def note_failure(self, url: str, reason: str) -> None:
        """Note that a host did not answer; check the network if that is suspicious."""
        with self._lock:
            self._failures[urlsplit(url).netloc] = reason
            is_suspicious = len(self._failures) >= HOSTS_IN_A_ROW
        if is_suspicious:
            self.check()

    def check(self) -> None:
        """If the last host failed, wait until a host answers, for a limited time.

        TemporaryError: none did, so the network is down.
        """
        with self._checking:
            if self._error:
                raise self._error
            deadline, pause = time.monotonic() + self._max_wait, 1.0
            while self._failures and not self._any_answers():
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._stopped.wait(min(pause, remaining)):
                    self._error = self._outage()
                    raise self._error
                pause *= 2

    def _any_answers(self) -> bool:
        for url in self._asked():
            if not self._failures:  # another thread got an answer
                return True
            if self._answers(url):
                self.note_answer(url)
                return True
        return False

    def _asked(self) -> list[str]:
        with self._lock:
            urls = [*reversed(self._answered.values()), *self._others]
        return list({urlsplit(url).netloc: url for url in urls}.values())

    def _outage(self) -> TemporaryError:
        reasons = Counter(self._failures.values()).most_common(1) or [("no connection", 1)]
        return TemporaryError(
            f"{self._subject}: the network of this machine seems to be down: no host answers "
            f"(most: {reasons[0][0]}); check network, name service and http_proxy, and run again, "
            "which fetches the rest; if these hosts are gone for good, correct the list"
        )
