"""Verdicts of filters."""

from tokamake.data.filters import Document, DocumentFilter


def verdict(loaded: DocumentFilter, text: str) -> tuple[str | None, str]:
    """The reason of the drop or None, and the text that is left."""
    document = Document(text, {})
    drop = loaded.apply(document)
    return (drop.reason, text) if drop else (None, document.text)
