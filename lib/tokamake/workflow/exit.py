"""Ends Snakemake with one line for a user's mistake."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tokamake.errors import UserError


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Print a `UserError` and exit; Snakemake would print it with its traceback."""
    try:
        yield
    except UserError as error:
        sys.exit("\n".join(f"tokamake: {line}" for line in str(error).splitlines()))
