"""Names in the table of corpora give each raw file once, in natural order."""

import os
from pathlib import Path

import pytest

from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.raw_files import raw_files, stamp
from tokamake.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with raw/b2.jsonl, raw/b10.jsonl and raw/deep/c.jsonl."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw/deep").mkdir(parents=True)
    for name in ("b2.jsonl", "b10.jsonl", "deep/c.jsonl"):
        (tmp_path / "raw" / name).write_text(name)
    return tmp_path


def paths(files: str, declared: dict[str, int] | None = None) -> list[str]:
    rows = raw_files(Corpus(corpus="a", files=files, weight=1), declared or {})
    return [file.path for file in rows]


def test_patterns_match_disk_and_declared_files() -> None:
    assert paths("raw/b*.jsonl made/*", {"made/b1.jsonl": 1, "made/x/y.jsonl": 1}) == [
        "made/b1.jsonl",
        "raw/b2.jsonl",
        "raw/b10.jsonl",
    ]
    assert paths("raw/**/*.jsonl") == ["raw/b2.jsonl", "raw/b10.jsonl", "raw/deep/c.jsonl"]
    assert paths("made/b[0-4]?.*", {"made/b35.x": 1, "made/b75.x": 1}) == ["made/b35.x"]
    assert paths("made/b[!0-4]?.*", {"made/b35.x": 1, "made/b75.x": 1}) == ["made/b75.x"]


def test_a_folder_stands_for_all_files_in_it(folder: Path) -> None:
    everything = ["raw/b2.jsonl", "raw/b10.jsonl", "raw/deep/c.jsonl"]
    assert paths("raw") == paths("raw/") == paths("raw/*") == everything
    assert paths("made", {"made/1.jsonl": 1, "made/x/2.jsonl": 1, "maded": 1}) == [
        "made/1.jsonl",
        "made/x/2.jsonl",
    ]


def test_only_a_pair_of_files_is_an_indexed_dataset(folder: Path) -> None:
    for name in ("a.bin", "b.txt", "b.idx", "c.idx", "c.bin"):
        (folder / name).write_text(name)
    assert paths("a.bin b.txt") == ["a.bin", "b.txt"]
    for name in ("b.idx", "c.idx", "c.bin"):
        with pytest.raises(UserError, match=f"{name}: an indexed dataset, not raw text"):
            paths(name)


def test_a_saved_dataset_stands_for_the_files_of_its_state(folder: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk("saved", num_shards=2)
    (folder / "saved/cache-0.arrow").write_text("left over")
    assert paths("saved") == [f"saved/data-0000{n}-of-00002.arrow" for n in range(2)]


def test_a_file_with_several_names_counts_once(folder: Path) -> None:
    assert paths(f"raw/b2.jsonl ./raw/b2.jsonl {folder}/raw/b2.jsonl") == ["raw/b2.jsonl"]
    (folder / "raw/a.jsonl").symlink_to("b2.jsonl")
    assert paths("raw/*.jsonl") == ["raw/a.jsonl", "raw/b10.jsonl"]


def test_a_recursive_pattern_ignores_empty_folders(folder: Path) -> None:
    before = paths("raw/**")
    (folder / "raw/empty").mkdir()
    assert paths("raw/**") == before


def test_files_beside_declared_files_are_ignored(folder: Path) -> None:
    assert paths("raw/**", {"raw/b1.jsonl": 1}) == ["raw/b1.jsonl", "raw/deep/c.jsonl"]
    assert paths("raw/*", {"raw/b1.jsonl": 1}) == ["raw/b1.jsonl"]
    assert paths(f"raw/*.jsonl {folder}/raw/*.jsonl", {"raw/b2.jsonl": 1}) == ["raw/b2.jsonl"]
    assert paths(f"{folder}/raw/*.jsonl", {"raw/b1.jsonl": 1}) == ["raw/b1.jsonl"]


def test_names_with_spaces_are_quoted(folder: Path) -> None:
    (folder / "raw/d e.jsonl").write_text("")
    assert paths('"raw/d e.*" raw/b2.jsonl') == ["raw/b2.jsonl", "raw/d e.jsonl"]
    with pytest.raises(UserError, match="no closing quotation; close the quote"):
        paths('"raw/b2.jsonl')


def test_a_missing_file_is_a_user_error(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r'corpus "a": files: raw/none\*: no file matches; fix the col'
    ):
        paths("raw/*.jsonl raw/none*")
    with pytest.raises(UserError, match=r"raw/none\.jsonl: no such file; fix the column"):
        paths("raw/none.jsonl")
    (folder / "raw/gone.jsonl").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"raw/gone.jsonl: cannot be read \(a link to a missing"):
        paths("raw/*.jsonl")


def test_the_order_is_natural(folder: Path) -> None:
    names = ["x1", "x01", "x2", "x10", "x10b9", "x10b10", "y"]
    for name in names:
        (folder / name).write_text("")
    assert paths("y x*") == ["x01", "x1", "x2", "x10", "x10b9", "x10b10", "y"]


def test_a_stamp_changes_with_size_time_and_names(folder: Path) -> None:
    corpus = Corpus(corpus="a", files="raw/*.jsonl", weight=1)
    stamps = {stamp(raw_files(corpus, {}))}
    before = (folder / "raw/b2.jsonl").stat()
    (folder / "raw/b2.jsonl").write_text("longer than before")
    os.utime(folder / "raw/b2.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    stamps.add(stamp(raw_files(corpus, {})))
    os.utime(folder / "raw/b2.jsonl", ns=(0, 0))
    stamps.add(stamp(raw_files(corpus, {})))
    (folder / "raw/b10.jsonl").rename(folder / "raw/b11.jsonl")
    stamps.add(stamp(raw_files(corpus, {})))
    (folder / "raw/b11.jsonl").unlink()
    stamps.add(stamp(raw_files(corpus, {})))
    assert len(stamps) == 5
    # The stamp ignores declared sizes: the file itself becomes an input of the job.
    declared = [stamp(raw_files(corpus, {"raw/b1.jsonl": size})) for size in (1, 2)]
    assert declared[0] == declared[1]
