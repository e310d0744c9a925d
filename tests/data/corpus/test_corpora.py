"""The table of corpora: every mistake is reported with its line."""

from pathlib import Path

import pytest

from tokamake.data.corpus.corpora import read_corpora
from tokamake.errors import UserError

TABLES = {
    "no corpus": "corpus\tfiles\tweight\n",
    r"corpora\.tsv:3: 2 columns, the header has 3": "# note\ncorpus\tfiles\tweight\na\tb c\n",
    r"corpora\.tsv:2: 1 column, the header has 3 \('a  b  1' has spaces, not a tab\)": (
        "corpus\tfiles\tweight\na  b  1\n"
    ),
    r"corpora\.tsv:2: 2 columns, the header has 3 \('a b' has spaces, not a tab\)": (
        "corpus\tfiles\tweight\na b\t1\n"
    ),
    r"corpora\.tsv:2: weight: '-1': input should be greater": "corpus\tfiles\tweight\na\tb\t-1\n",
    r"corpora\.tsv:2: weight: 'inf'": "corpus\tfiles\tweight\na\tb\tinf\n",
    r"corpora\.tsv:2: no weight, epochs or temperature; give": "corpus\tfiles\tweight\na\tb\t \n",
    r"corpora\.tsv:2: has weight and epochs; keep one": (
        "corpus\tfiles\tweight\tepochs\na\tb\t1\t2\n"
    ),
    r"corpora\.tsv:2: epochs: '0': input should be greater": "corpus\tfiles\tepochs\na\tb\t0\n",
    r"corpora\.tsv:2: temperature: 'inf'": "corpus\tfiles\ttemperature\na\tb\tinf\n",
    r"corpora\.tsv:3: temperature 2, but line 2 has a weight; give all": (
        "corpus\tfiles\tweight\ttemperature\na\tb\t1\t\nb\tb\t\t2\n"
    ),
    r"corpora\.tsv:1: share: no such column; choose among corpus, files,": (
        "corpus\tfiles\tweight\tshare\na\tb\t1\t2\n"
    ),
    r"corpora\.tsv:2: corpus  files: spaces between columns; separate columns with one tab": (
        "# made by hand\ncorpus  files\tweight\na  b\t1\n"
    ),
    r'corpora\.tsv:3: corpus "a" is in line 2, too; give each row its own name': (
        "corpus\tfiles\tweight\na\tb\t1\na\tc\t1\n"
    ),
    r"corpora\.tsv:2: corpus: 'a/b'": "corpus\tfiles\tweight\na/b\tb\t1\n",
}


@pytest.mark.parametrize("expected", TABLES)
def test_mistakes_name_the_line_and_the_remedy(tmp_path: Path, expected: str) -> None:
    path = tmp_path / "corpora.tsv"
    path.write_text(TABLES[expected])
    with pytest.raises(UserError, match=expected):
        read_corpora(path)


def test_the_default_temperature_applies_to_rows_without_share(tmp_path: Path) -> None:
    path = tmp_path / "corpora.tsv"
    path.write_text("corpus\tfiles\tepochs\ttemperature\na\tx\t1.5\t\nb\tx\t\t\nc\tx\t\t2\n")
    rows = read_corpora(path, temperature=5)
    assert [(row.weight, row.epochs, row.temperature) for row in rows] == [
        (None, 1.5, None),
        (None, None, 5),
        (None, None, 2),
    ]
    with pytest.raises(UserError, match=r"corpora\.tsv:3: no weight, epochs or temperature"):
        read_corpora(path)


def test_a_missing_table_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; fix corpora"):
        read_corpora(tmp_path / "none.tsv")
