"""A filter that takes too long is interrupted; other timers of the process continue."""

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tokamake.data.filters._time_limit import TimeLimit, TimeLimitExceeded

LETTERS = "a" * 60 + "!"


def _swallow() -> None:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)


@pytest.mark.parametrize(
    "endless",
    [
        lambda: re.search(r"(a+)+$", LETTERS),
        lambda: re.sub(r"(a|aa)+$", "", LETTERS),
        lambda: [*re.finditer(r"(?=(a+)+$)", LETTERS)],
        lambda: re.search(r"(a*)*\1b", LETTERS),
        lambda: re.split(r"\s+$", " " * 10_000_000 + "a"),
        _swallow,
    ],
)
def test_it_interrupts(endless: Callable[[], object]) -> None:
    limit = TimeLimit(0.1)
    started = time.monotonic()
    with pytest.raises(TimeLimitExceeded), limit.watch():
        limit.running = 0
        try:
            endless()
        finally:
            limit.running = -1
    assert 0.1 <= time.monotonic() - started < 10


def test_a_document_has_the_whole_time_in_all_filters() -> None:
    limit = TimeLimit(0.2)
    with limit.watch():
        for document in range(4):  # longer than the limit together
            limit.running = document
            time.sleep(0.1)
            limit.running = -1
    with pytest.raises(TimeLimitExceeded), limit.watch():
        for _ in range(30):  # short calls of one document
            limit.running = 0
            time.sleep(0.03)
            limit.running = -1


def test_the_timer_and_the_handler_from_before_continue() -> None:
    rang: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: rang.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with TimeLimit(1).watch():
            time.sleep(0.2)
        time.sleep(0.05)
        assert rang == [signal.SIGALRM]
        with TimeLimit(0).watch():
            assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_thread_has_no_limit() -> None:
    limit, ended = TimeLimit(0.05), []

    def work() -> None:
        with limit.watch():
            limit.running = 0
            time.sleep(0.2)
            limit.running = -1
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
