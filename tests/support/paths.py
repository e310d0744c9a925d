"""Folders of the repository that tests use."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
SUPPORT = Path(__file__).parent
"""Helpers of the tests; some are programs of their own."""
REPLIES = SUPPORT / "pbs_replies"
"""Replies of a real PBS."""
