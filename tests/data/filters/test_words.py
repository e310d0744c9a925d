"""The words that near-duplicates and decontamination compare."""

import hashlib

from tokamake.data.filters._words import word_characters


def test_the_table_of_characters_is_the_same_with_each_version_of_python() -> None:
    """Unicode changes with Python; keys on disk must not."""
    digest = hashlib.sha256(word_characters().astype("<u4").tobytes()).hexdigest()
    assert digest[:16] == "57d51b9486894bbd"
