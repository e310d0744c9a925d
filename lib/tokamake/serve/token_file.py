"""File with the bearer token of a server."""

from pathlib import Path

from tokamake.errors import UserError, of_system


def read_token(path: Path | None) -> str:
    """The token in a file; empty without a file."""
    if path is None:
        return ""
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UserError(f"token_file: {of_system(error)}; fix the path") from None
    except UnicodeDecodeError:
        raise UserError(f"token_file: {path}: not ASCII; give a token of ASCII letters") from None
    if (num_words := len(token.split())) != 1:
        raise UserError(f"token_file: {path}: holds {num_words} words; write one, the token")
    return token
