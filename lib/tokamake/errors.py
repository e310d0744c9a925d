"""The one exception for a user's mistake; the command line prints it without a traceback."""


class UserError(Exception):
    """A mistake the user can mend: the message says what, which value, where, and the remedy.

    Attributes:
        among_ranks: whether threads of a process group were about, with which Python's own way out
            could abort.
    """

    among_ranks = False


def of_system(error: OSError) -> str:
    """What an error of the operating system says, for people: the file and the reason."""
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or str(error) or type(error).__name__}"
