"""YAML files: mistakes are reported with file, line and remedy."""

from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.validation import parse_yaml, read_yaml

MISTAKES = {
    r"^a\.yaml:2: indented with a tab; YAML needs spaces": "train:\n\tsteps: 1\n",
    r"^a\.yaml:3: indented with a tab; YAML needs spaces": "train:\n  steps: 1\n\tseed: 2\n",
    r"^a\.yaml:3: steps: is in line 2, too; keep one": "train:\n  steps: 1\n  steps: 1\n",
    r"^a\.yaml:1: b: is in line 1, too; keep one": "a: [{b: 1, b: 2}]\n",
    r"^a\.yaml:2: not valid YAML \(.*\); fix it": "a: 1\nb: [\n",
    r"^a\.yaml: not valid YAML \(.*\); fix it": "a: \x01\n",
}


@pytest.mark.parametrize("expected", MISTAKES)
def test_mistakes_in_yaml_name_the_line_and_the_remedy(expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        parse_yaml(MISTAKES[expected], "a.yaml")


@pytest.mark.parametrize(
    "text", ["a: &x {b: 1}\nc: {<<: *x, b: 2}\nd: [*x, *x]\n", "{1: a, '1': b}", "", "a: 'x\ty'\n"]
)
def test_repeated_aliases_and_tabs_in_text_are_valid(text: str) -> None:
    parse_yaml(text, "a.yaml")


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(UserError, match=r"a\.yaml: not UTF-8; save the file as UTF-8"):
        read_yaml(tmp_path / "a.yaml", "fix it")
