"""Short forms of the section `retrieval`, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tokamake.config.retrieval import RetrievalSettings


def test_files_and_an_index_have_short_forms() -> None:
    short = RetrievalSettings(passages="wiki", questions="qa/nq.tsv", index="IVF64,Flat")  # type: ignore[arg-type]
    assert (short.passages, short.questions) == (("wiki",), {"nq": Path("qa/nq.tsv")})
    assert short.index is not None
    assert short.index.factory == "IVF64,Flat"
    assert RetrievalSettings().passages is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"questions": "nq.tsv"}, "questions: there are no passages to find; set passages"),
        ({"passages": ["wiki"]}, "passages: there are no questions to find them; set questions"),
        ({"match": "words"}, "match"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RetrievalSettings(**values)
