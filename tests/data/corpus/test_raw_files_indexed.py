"""Rows of existing indexed datasets: prefixes, folders and patterns; what no row may have."""

import os
from pathlib import Path

import pytest

from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus, read_corpora
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.raw_files import dataset_files, dataset_pairs
from tokamake.data.mixture.weigh import read_listed_corpora
from tokamake.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for prefix in ("pre/web-2", "pre/web-10", "pre/other", "pre/.web-3.tmp"):
        for suffix in ("bin", "idx"):
            path = Path(f"{prefix}.{suffix}")
            path.parent.mkdir(exist_ok=True)
            path.write_text(prefix)
    Path("pre/web-2.json").write_text("{}")
    return tmp_path


def row(files: str, **columns: str) -> Corpus:
    return Corpus(corpus="web", files=files, format="indexed", weight=1, **columns)  # type: ignore


def prefixes(files: str) -> list[str]:
    return [dataset.prefix for dataset in dataset_files(row(files))]


@pytest.mark.parametrize("end", ["", ".bin", ".idx"])
def test_names_and_patterns_with_or_without_the_end_of_a_file(folder: Path, end: str) -> None:
    assert prefixes(f"pre/web-2{end}") == ["pre/web-2"]
    assert prefixes(f"pre/web-*{end}") == ["pre/web-2", "pre/web-10"]
    assert prefixes(f"pre/other{end} pre/web-2{end}") == ["pre/other", "pre/web-2"]
    assert prefixes(f"{folder}/pre/other{end}") == [f"{folder}/pre/other"]


def test_a_folder_stands_for_its_datasets_without_temporary_files(folder: Path) -> None:
    assert prefixes("pre") == prefixes("pre/") == ["pre/other", "pre/web-2", "pre/web-10"]


def test_a_dataset_with_two_names_counts_once(folder: Path) -> None:
    for suffix in ("bin", "idx"):
        Path(f"link.{suffix}").symlink_to(f"pre/other.{suffix}")
    assert prefixes("pre/other link") == ["pre/other"]


def test_what_is_missing_is_named(folder: Path) -> None:
    for files, fault in (
        ("pre/none", "pre/none: no such dataset; give prefixes of .bin and .idx files"),
        ("pre/none-*", r"pre/none-\*: no indexed dataset matches"),
    ):
        with pytest.raises(UserError, match=f'corpus "web": files: {fault}'):
            prefixes(files)
    Path("pre/web-10.idx").unlink()
    with pytest.raises(UserError, match=r"pre/web-10\.idx: cannot be read .* other file of the"):
        prefixes("pre")


def test_columns_of_raw_text_have_no_effect() -> None:
    table = Path("corpora.tsv")
    with pytest.raises(ValueError, match="text_key: 'body': no effect on a corpus that is token"):
        row("pre", text_key="body")
    with pytest.raises(ValueError, match=r"template: '\{a\}': no effect on a corpus that is"):
        row("pre", template="{a}")
    with pytest.raises(UserError, match="no such file"):
        read_corpora(table)


@pytest.mark.parametrize("files", ["pre/*.bin", "pre/other.idx", "pre"])
def test_a_row_of_raw_text_says_how_to_name_datasets(folder: Path, files: str) -> None:
    Path("pre/web-2.json").unlink()
    corpus = Corpus(corpus="web", files=files, weight=1)
    with pytest.raises(UserError, match=r"an indexed dataset, not raw text; give .* indexed"):
        make_plan([corpus], PlanSettings(), declared={})


def test_merged_datasets_keep_their_names_when_others_come(folder: Path) -> None:
    def plan_of(files: str, **options: object):  # type: ignore[no-untyped-def]
        return make_plan([row(files)], PlanSettings(), declared={}, **options)  # type: ignore

    def names(plan) -> dict[str, str]:  # type: ignore[no-untyped-def]
        return {merge.dataset: merge.name for merge in plan.merged}

    first = plan_of("pre/web-*")
    assert names(first) == {
        "pre/web-2": "web-0000_text_document",
        "pre/web-10": "web-0001_text_document",
    }
    assert (first.shards, first.tokenizer) == ((), ())
    assert [batch.members for batch in first.merge_batches] == [
        ("web-0000_text_document",),
        ("web-0001_text_document",),
    ]
    more = plan_of("pre", previous=first)
    assert names(more) == {**names(first), "pre/other": "web-0002_text_document"}
    assert plan_of("pre/web-10", previous=more).merged[0].name == "web-0001_text_document"
    stamps = {merge.dataset: merge.stamp for merge in more.merged}
    os.utime("pre/web-2.idx", ns=(0, 0))
    changed = {merge.dataset: merge.stamp for merge in plan_of("pre", previous=more).merged}
    assert {name for name in stamps if stamps[name] != changed[name]} == {"pre/web-2"}


# Lines of a weighting file


def listed(*lines: str) -> list[str]:
    weights = Path("mix/weights.txt")
    weights.parent.mkdir(exist_ok=True)
    weights.write_text("# weights\n" + "".join(f"{line}\n" for line in lines))
    return [
        dataset.prefix
        for corpus in read_listed_corpora(weights, Path())
        for dataset in dataset_files(corpus)
    ]


def test_lines_of_a_weighting_file_name_datasets(folder: Path) -> None:
    assert listed("1 pre/web-10", "2 pre/web-2.bin", f"1 {folder}/pre/other mine") == [
        *("pre/web-2", "pre/web-10"),
        f"{folder}/pre/other",
    ]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["1 pre/web-2", "1 none/web-3"], "3: none/web-3: no such dataset: it has neither .bin"),
        (["1 pre/web-2", "1 pre"], "3: pre: a folder, but a line names one dataset; list"),
        (["1 pre/web-2", "1 {}/pre/web-2"], "3: {}/pre/web-2: the same files as in mix/weights"),
    ],
)
def test_faults_of_lines_name_their_line(folder: Path, lines: list[str], fault: str) -> None:
    with pytest.raises(UserError) as caught:
        listed(*(line.format(folder) for line in lines))
    assert str(caught.value).startswith(f"mix/weights.txt:{fault.format(folder)}")


def test_a_line_whose_dataset_lacks_a_file_is_named(folder: Path) -> None:
    Path("pre/web-2.idx").unlink()
    with pytest.raises(UserError, match=r"weights\.txt:2: pre/web-2\.idx: cannot be read"):
        listed("1 pre/web-2")


# Pairs of datasets


def pairs(*names: str, text_key: str = "text,title") -> list[dict[str, str]]:
    for name in names:
        for suffix in ("bin", "idx"):
            Path("pairs").mkdir(exist_ok=True)
            Path(f"pairs/{name}.{suffix}").touch()
    found = dataset_pairs(row("pairs", text_key=text_key))
    return [{key: dataset.prefix for key, dataset in pair.items()} for pair in found]


WIKI = ("wiki_text_sentence", "wiki_title_document")


@pytest.mark.usefixtures("folder")
def test_datasets_are_paired_by_the_keys_in_their_names() -> None:
    assert pairs(*WIKI, "a_text_b_text", "a_text_b_title") == [
        {"text": "pairs/a_text_b_text", "title": "pairs/a_text_b_title"},
        {"text": "pairs/wiki_text_sentence", "title": "pairs/wiki_title_document"},
    ]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (WIKI[:1], "pairs/wiki_text_sentence: no dataset pairs/wiki_title_document beside it"),
        ((*WIKI, "web"), "pairs/web: its name ends in no key of text_key text,title, such as _t"),
        ((*WIKI, "wiki_text"), "pairs/wiki_text_sentence: a second dataset of the key text beside"),
    ],
)
def test_datasets_without_a_pair_are_refused(names: tuple[str, ...], fault: str) -> None:
    with pytest.raises(UserError, match=f'^corpus "web": files: {fault}'):
        pairs(*names)


@pytest.mark.usefixtures("folder")
def test_links_of_a_pair_have_one_number() -> None:
    pairs(*WIKI)
    corpus = row("pairs", text_key="text,title")
    first = make_plan([corpus], PlanSettings(), declared={})
    names = {merge.dataset: merge.name for merge in first.merged}
    assert names == {
        f"pairs/{WIKI[0]}": "web-0000_text_document",
        f"pairs/{WIKI[1]}": "web-0000_title_document",
    }
    pairs("a_text", "a_title")
    more = make_plan([corpus], PlanSettings(), declared={}, previous=first)
    assert {merge.dataset: merge.name for merge in more.merged} == {
        **names,
        "pairs/a_text": "web-0001_text_document",
        "pairs/a_title": "web-0001_title_document",
    }
    # Without the keys, each dataset is a text: names that keep a key would be wrong.
    alone = make_plan([row("pairs")], PlanSettings(), declared={}, previous=first)
    assert all(merge.name.endswith("_text_document") for merge in alone.merged)
    assert len({merge.name for merge in alone.merged}) == 4
