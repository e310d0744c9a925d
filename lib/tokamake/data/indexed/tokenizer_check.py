"""Whether a pair was made with a tokenizer, as far as its manifest tells.

Asked where tokens of a pair become text again.
"""

from pathlib import Path

from tokamake import files
from tokamake.data.indexed.paths import manifest_path
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError


def check_tokenizer(prefix: Path, tokenizer: Tokenizer) -> None:
    """A pair of another program has no manifest; nothing can be said about its tokenizer.

    Raises:
        UserError: the pair was made with another tokenizer.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return
    made_with = files.read_json(path, "make the pair again").get("tokenizer")
    if made_with not in (None, tokenizer.fingerprint):
        raise UserError(
            f"{prefix}: made with another tokenizer ({made_with[:12]}) than the one given "
            f"({tokenizer.fingerprint[:12]}); give the tokenizer it was made with"
        )
