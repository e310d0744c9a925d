"""A job that ends early goes on with the next shard, and its rows are the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokamake.config.data import PlanSettings
from tokamake.data.corpus import filtered_documents
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.hash_documents import hash_documents
from tokamake.data.corpus.hash_passages import hash_passages
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import write_plan
from tokamake.data.corpus.sign_documents import sign_documents
from tokamake.errors import UserError

NUM_FILES = 4
STAGES: dict[str, Callable[..., None]] = {
    "hash_documents": hash_documents,
    "sign_documents": sign_documents,
    "hash_passages": hash_passages,
}


FILTER = """
from tokamake.data.filters import DocumentFilter

class Filter(DocumentFilter):
    def apply(self, document):
        document.text += " {end}"
"""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the raw files that are opened, in order; a batch of four shards is planned."""
    monkeypatch.chdir(tmp_path)
    for number in range(NUM_FILES):
        lines = [{"text": f"a line of {number}, the number {line}\n" * 3} for line in range(20)]
        Path(f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = Corpus(corpus="a", files="*.jsonl", weight=1)
    write_plan(
        Path("plan.json"),
        make_plan([corpus], PlanSettings(shard_bytes=2500, max_jobs=1), declared={}),
    )
    names: list[str] = []
    original = filtered_documents.open_unchanged

    def open_unchanged(paths: list[Path], *args: Any, **options: Any) -> Any:
        names.extend(path.stem for path in paths)
        return original(paths, *args, **options)

    monkeypatch.setattr(filtered_documents, "open_unchanged", open_unchanged)
    return names


def make(stage: str, output: str, **options: Any) -> bytes:
    options = {"plan": Path("plan.json"), "batch": "a-00000", **options}
    STAGES[stage](output=Path(output), **options)
    return Path(output).read_bytes()


def interrupt(stage: str, output: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """End a job while it reads the third shard."""
    original = filtered_documents.DocumentSource._blocks

    def blocks(self: Any, shard: Any, run: Any) -> Any:
        for number, block in enumerate(original(self, shard, run)):
            if shard.files[0].startswith("2") and not number:
                raise KeyboardInterrupt
            yield block

    with monkeypatch.context() as patched:
        patched.setattr(filtered_documents.DocumentSource, "_blocks", blocks)
        with pytest.raises(KeyboardInterrupt):
            make(stage, output, **options)
    assert not Path(output).exists()


@pytest.mark.parametrize("stage", STAGES)
def test_finished_shards_are_not_read_again(
    stage: str, opened: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    expected = make(stage, "calm")
    interrupt(stage, "rows", monkeypatch)
    opened.clear()
    capsys.readouterr()
    assert make(stage, "rows") == expected
    assert opened == ["2", "3"]
    assert "rows: 2 shards were finished by an earlier job" in capsys.readouterr().out
    assert not list(Path().glob(".*"))  # nothing is left


def change_filter() -> None:
    Path("mine.py").write_text(FILTER.format(end=2))


def damage_parts() -> None:
    for part in Path(".rows.parts").iterdir():
        part.write_bytes(part.read_bytes().replace(b'"a/', b'"b/'))


@pytest.mark.parametrize(
    ("options", "change"),
    [({"rows": 4}, None), ({"filters": "mine.py"}, change_filter), ({}, damage_parts)],
)
def test_shards_are_read_again_after_a_change(
    options: dict[str, Any],
    change: Callable[[], None] | None,
    opened: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("mine.py").write_text(FILTER.format(end=1))
    interrupt("sign_documents", "rows", monkeypatch, **(options if change else {}))
    if change:
        change()
    opened.clear()
    rows = make("sign_documents", "rows", **options)
    assert opened == ["0", "1", "2", "3"]
    assert rows == make("sign_documents", "again", **options)


def test_a_changed_raw_file_is_refused(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt("hash_documents", "rows", monkeypatch)
    Path("3.jsonl").write_text('{"text": "changed"}\n')
    opened.clear()
    with pytest.raises(UserError, match=r"3\.jsonl"):
        make("hash_documents", "rows")
    assert not Path("rows").exists()
