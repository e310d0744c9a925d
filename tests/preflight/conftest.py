"""Fixtures of the tests of training and of the workflow, whose runs these checks compare."""

from tests.train.conftest import root, single
from tests.workflow.conftest import built, workspace_here

__all__ = ["built", "root", "single", "workspace_here"]
