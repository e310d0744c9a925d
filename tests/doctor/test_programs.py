"""Programs that answer, fail, hang or are missing."""

from pathlib import Path

import pytest

from tests.doctor.conftest import time_out
from tests.support.pbs_servers import wait_for
from tokamake.doctor import programs


def test_programs_answer_fail_hang_or_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert programs.ask(["echo", "yes"], seconds=60).output == "yes\n"
    failed = programs.ask(["sh", "-c", "echo no such server >&2; exit 3"], seconds=60)
    assert failed.fault == "no such server (exit status 3)"
    assert programs.ask(["sleep", "600"], seconds=0.1).fault == "no answer within 0.1 s"
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with monkeypatch.context() as patch:
        time_out(patch, tmp_path / "pid")
        hanging = programs.ask(["sh", "-c", script], seconds=2)
    assert hanging.fault == "no answer within 2 s"
    state = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    wait_for(lambda: not state.exists() or " Z " in state.read_text(), "its child to end")
    assert "No such file" in programs.ask(["no-such-program"], seconds=60).fault
