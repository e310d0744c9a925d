"""Ends Snakemake with one line and exit status 2 for a user's mistake."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tokamake.errors import EXIT_USER_ERROR, UserError


def exit_with(message: str) -> NoReturn:
    """Print a message about a user's mistake and exit."""
    for line in message.splitlines():
        print(f"tokamake: {line}", file=sys.stderr)
    sys.exit(EXIT_USER_ERROR)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Print a `UserError`, or that a disk is full, and exit; Snakemake would print a traceback."""
    try:
        yield
    except UserError as error:
        exit_with(str(error))
    except KeyboardInterrupt:  # in a listing of the Hub, for example
        print("tokamake: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        exit_with(f"{error.filename or 'results'}: {error.strerror}; free some space, then rerun")
