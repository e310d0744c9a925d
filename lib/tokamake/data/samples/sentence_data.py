"""Whether the sequences of a dataset are what an objective needs: sentences or documents."""

from pathlib import Path

from tokamake.data.indexed.merge_inputs import find_manifest
from tokamake.errors import UserError


def check_sentences(prefix: Path, *, objective: str) -> None:
    """Check a dataset whose manifest states whether its sequences are sentences."""
    manifest = find_manifest(prefix)
    if manifest is None or "split_sentences" not in manifest:
        return
    if manifest["split_sentences"] and objective == "causal":
        raise UserError(
            f"{prefix}: its sequences are sentences (tokenize.split_sentences: true), which "
            "objective causal would shuffle; set train.objective to masked or span_corruption, or "
            "tokenize the corpus with split_sentences: false"
        )
    if objective != "causal" and not manifest["split_sentences"]:
        raise UserError(
            f"{prefix}: its sequences are documents, objective {objective} needs sentences; "
            "tokenize the corpus with tokenize.split_sentences: true, or set train.objective to "
            "causal"
        )


def ends_with_eod(prefix: Path) -> bool:
    """Whether the manifest of a dataset says that its documents end with a token of their own."""
    manifest = find_manifest(prefix)
    return bool(manifest and manifest.get("append_eod"))
