"""Check that an indexed dataset was made with a given tokenizer."""

from pathlib import Path

from tokamake import files
from tokamake.data.indexed.paths import manifest_path
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError


def check_tokenizer(prefix: Path, tokenizer: Tokenizer) -> None:
    """Compare the fingerprint of a tokenizer, or of its base tokenizer, with the manifest.

    A dataset of another program has no manifest; it passes unchecked.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return
    fingerprint = files.read_json(path, "rebuild the dataset").get("tokenizer")
    known = [tokenizer.fingerprint, *filter(None, [tokenizer.base])]
    if fingerprint not in (None, *known):
        raise UserError(
            f"{prefix}: made with another tokenizer ({fingerprint[:12]}) than the one given "
            f"({tokenizer.fingerprint[:12]}); give the tokenizer that made the dataset"
        )
