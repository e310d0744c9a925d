"""Fixture of the tests of `tokamake doctor`."""

import json
import os
from pathlib import Path

import pytest

from tests.support.doctor_sites import QSTAT, SITE, program
from tests.support.runs import MPI


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster with PBS, a profile and a user's file."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    folder = tmp_path / "site"
    folder.mkdir()
    (tmp_path / "mine.yaml").write_text("account: proj\nqueue: debug\n")
    (folder / "profile.yaml").write_text(SITE.format(mine=tmp_path / "mine.yaml"))
    (folder / "environment.sh").write_text(f"export MPI4PY_LIBMPI={MPI}\n")
    modules = '. "$(dirname "$0")/environment.sh"'
    text = f"#!/bin/sh\n{modules}\n# no srun here\nexec mpiexec -n $2\n"
    (folder / "launch.sh").write_text(text)
    (folder / "launch.sh").chmod(0o755)
    for name in ("qsub", "qselect", "qdel"):
        program(tmp_path, name, "")
    program(tmp_path, "qstat", f"cat <<'END'\n{json.dumps(QSTAT)}\nEND")
    return tmp_path
