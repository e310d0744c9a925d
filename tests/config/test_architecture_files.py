"""Settings after the name of an architecture's file, and sizes that follow from them."""

from pathlib import Path

import pytest

from tokamake.config.architecture_files import read_architecture
from tokamake.errors import UserError


def test_settings_after_the_name_of_a_file_replace_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4}")
    read = read_architecture(Path(f"{file}:num_hidden_layers=7:tie_word_embeddings=true"))
    assert (read.num_hidden_layers, read.tie_word_embeddings, read.hidden_size) == (7, True, 64)
    for text, message in (
        ("layers=7", r"a.yaml:layers=7: .*unknown key"),
        ("hidden_size=wide", "hidden_size: 'wide'"),
    ):
        with pytest.raises(UserError, match=message):
            read_architecture(Path(f"{file}:{text}"))


def test_sizes_follow_from_the_sizes_that_settings_replace(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "{family: gpt, hidden_size: 64, intermediate_size: 100, num_hidden_layers: 2,"
        " num_attention_heads: 4, num_key_value_heads: 4}"
    )
    read = read_architecture(Path(f"{file}:hidden_size=128:num_attention_heads=8"))
    assert (read.intermediate_size, read.num_key_value_heads) == (512, 8)
    read = read_architecture(Path(f"{file}:hidden_size=128:intermediate_size=99"))
    assert (read.intermediate_size, read.num_attention_heads) == (99, 4)
    assert read_architecture(Path(f"{file}:num_hidden_layers=3")).intermediate_size == 100
    with pytest.raises(UserError) as failed:
        read_architecture(Path(f"{file}:hidden_size=wide"))
    assert len(str(failed.value).splitlines()) == 1  # no word about sizes that follow
