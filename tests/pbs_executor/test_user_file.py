"""The user file: its values, and errors in it."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.errors import UserError
from snakemake_executor_plugin_pbs.request import PERSONAL
from snakemake_executor_plugin_pbs.user_file import (
    misspelled_rules,
    read_user_file,
    required_names,
)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("acount: A\n", "acount: unknown; known are account"),
        ("- account\n", "is not a mapping"),
        ("account: [a]\n", "must be a string"),
        ("rules: [train]\n", "rules: is not a mapping"),
        ("rules: {train: prod}\n", "rules: train: 'prod'"),
        ("rules: {train: {q: prod}}\n", "rules: train: q: unknown"),
        ("a: : b\n", "is not YAML"),
    ],
)
def test_errors_in_the_user_file(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "me.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        read_user_file(path, PERSONAL)


def test_an_unreadable_user_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_user_file(tmp_path, PERSONAL)
    path = tmp_path / "me.yaml"
    path.write_bytes("account: Münster\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"me.yaml: is not UTF-8"):
        read_user_file(path, PERSONAL)


def test_misspelled_rules_of_the_user_file_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "me.yaml"
    path.write_text(
        "rules: {trian: {queue: prod}, elsewhere: {queue: prod}, train: {queue: prod}}\n"
    )
    warnings = misspelled_rules(read_user_file(path, PERSONAL), {"train", "tokenize", "prepare"})
    message = f"{path}: rules: trian: no rule or group has this name; did you mean train?"
    assert warnings == [message]


def test_required_names_are_parsed() -> None:
    names = ("account", "queue", "filesystems")
    assert required_names("account, queue filesystems", PERSONAL) == names
    with pytest.raises(UserError, match="required: 'acount': unknown; known are account"):
        required_names("acount queue", PERSONAL)


def test_a_missing_user_file_has_no_values(tmp_path: Path) -> None:
    assert read_user_file(tmp_path / "none.yaml", PERSONAL).common == {}
