"""Options of a server: its limits, and the file with its bearer token."""

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from tokamake.errors import UserError, of_system


@Parameter(name="*")
@dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    max_length: int | None = None
    """Longest sequence in tokens, prompt and continuation; by default the context of the model."""
    batch_size: int = 16
    """Sequences that continue at the same time."""
    max_queue: int = 256
    """Sequences that may wait for a place; more requests are refused with status 429."""
    max_body: int = 1_000_000
    """Largest body of a request in bytes."""
    max_seconds: float = 300.0
    """Longest time of a request."""
    grace_seconds: float = 30.0
    """Time that requests in flight have to end after a signal to stop."""

    def check(self) -> None:
        """Check the ranges of all values."""
        for name, least in (
            ("max_length", 2),
            ("batch_size", 1),
            ("max_queue", 0),
            ("max_body", 1),
            ("max_seconds", 1),
            ("grace_seconds", 0),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**31:
                raise UserError(f"{name}: {value}: out of range; give {least} or more")


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
