"""The exception for mistakes of the user. The command line prints it without a traceback."""


class UserError(Exception):
    """A mistake that the user can fix. The message gives the subject, value, place and remedy.

    Attributes:
        among_ranks: whether a process group exists. Its threads can make a normal exit of Python
            abort.
    """

    among_ranks = False


def of_system(error: OSError) -> str:
    """Message of an error of the operating system: the file and the reason."""
    prefix = f"{error.filename}: " if error.filename else ""
    return f"{prefix}{error.strerror or str(error) or type(error).__name__}"
