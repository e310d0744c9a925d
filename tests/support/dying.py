"""`python dying.py train --config run.yaml`: a training killed during its second checkpoint."""

import os
import signal
from pathlib import Path

from tokamake.cli import main
from tokamake.train import resume
from tokamake.train.resume_state import ResumeState

_commit = resume.commit


def commit(output: Path, state: ResumeState) -> Path:
    """Move the first checkpoint into place; at the second, die before anything is renamed."""
    if state.step > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return _commit(output, state)


if __name__ == "__main__":
    resume.commit = commit
    main()
