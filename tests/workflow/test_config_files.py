"""Config files are checked before Snakemake reads them."""

from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.workflow.config import check_config_files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"a: 1\na: 2\n", r"^my\.yaml:2: a: is in line 1, too"),
        (b"a:\n\tb: 2\n", r"^my\.yaml:2: indented with a tab"),
        (b"a: \xff\n", r"my\.yaml: not UTF-8"),
    ],
)
def test_mistakes_name_the_file_as_the_user_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_bytes(text)
    with pytest.raises(UserError, match=expected):
        check_config_files([tmp_path / "my.yaml"])


@pytest.mark.parametrize(
    "text", ['{\n\t"a": 1\n}\n', "__use_yte__: true\n?if True:\n  a: 1\n?if True:\n  b: 1\n"]
)
def test_json_and_templates_that_snakemake_reads_are_valid(tmp_path: Path, text: str) -> None:
    (tmp_path / "my.yaml").write_text(text)
    check_config_files([tmp_path / "my.yaml", tmp_path / "none.yaml"])
