"""Whether the sequences of a dataset are what an objective needs: sentences or documents."""

from pathlib import Path

from tokamake.config.objective import objective_data, sentence_objectives
from tokamake.data.indexed.manifest import find_manifest
from tokamake.errors import UserError


def check_sentences(prefix: Path, *, objective: str) -> None:
    """Check a dataset whose manifest states whether its sequences are sentences."""
    manifest = find_manifest(prefix)
    if manifest is None or "split_sentences" not in manifest:
        return
    has_sentences = objective_data(objective).has_sentences
    if manifest["split_sentences"] and not has_sentences:
        raise UserError(
            f"{prefix}: its sequences are sentences (tokenize.split_sentences: true), which "
            f"objective {objective} would shuffle; set train.objective to "
            f"{sentence_objectives()}, or tokenize the corpus with split_sentences: false"
        )
    if has_sentences and not manifest["split_sentences"]:
        raise UserError(
            f"{prefix}: its sequences are documents, objective {objective} needs sentences; "
            "tokenize the corpus with tokenize.split_sentences: true, or set train.objective to "
            "causal"
        )


def ends_with_eod(prefix: Path) -> bool:
    """Whether the manifest of a dataset says that its documents end with a token of their own."""
    manifest = find_manifest(prefix)
    return bool(manifest and manifest.get("append_eod"))
