"""Fixtures of the tests of training, for checks that compare a run with its checkpoints."""

from tests.train.conftest import root, single

__all__ = ["root", "single"]
