"""Signals that stop a training, and a second Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest

from tokamake.train.stopping import stop_signals
from tokamake.train.stopping.stop_signals import StopRequest

TWICE = """
import os, signal, time
from tokamake.train.stopping import stop_signals
stop_signals._REPEAT_SECONDS = {least}
request = stop_signals.StopRequest(reports=True)
with stop_signals.on_signals(request.note):
    os.kill(os.getpid(), signal.{first})
    os.kill(os.getpid(), signal.{second})
    os.write(1, request.by.encode())
"""


@pytest.mark.parametrize(
    ("first", "second", "least", "code", "printed"),
    [
        ("SIGINT", "SIGINT", 0, 130, "ended by a second Ctrl-C; the same command continues"),
        ("SIGTERM", "SIGINT", 0, 130, "ended by a second Ctrl-C; the same command continues"),
        ("SIGINT", "SIGINT", 1e9, 0, "SIGINT"),
        ("SIGINT", "SIGTERM", 0, 0, "SIGINT"),
        ("SIGTERM", "SIGTERM", 0, 0, "SIGTERM"),
    ],
)
def test_a_second_ctrl_c_ends_the_process_at_once(
    first: str, second: str, least: float, code: int, printed: str
) -> None:
    program = TWICE.format(first=first, second=second, least=least)
    # A shell ignores SIGINT in its background jobs; on_signals must install its handler even so.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(printed)


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in stop_signals.SIGNALS]
    request = StopRequest(reports=False)
    with stop_signals.on_signals(request.note):
        os.kill(os.getpid(), signal.SIGINT)
    assert request.by == "SIGINT"
    assert [signal.getsignal(number) for number in stop_signals.SIGNALS] == before
