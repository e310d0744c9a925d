"""The one exception for a user's mistake; the command line prints it without a traceback."""


class UserError(Exception):
    """A mistake the user can mend: the message says what, which value, where, and the remedy."""
