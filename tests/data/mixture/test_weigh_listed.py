"""Weighting files that list existing datasets become corpora with the weights of their lines."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.data.mixture.test_weigh import write_table
from tokamake.config.resolved_run import ROOT_VARIABLE
from tokamake.data.corpus.corpora import Corpus, check_rows
from tokamake.data.corpus.plan_file import Plan, PlannedMerge, read_plan, write_plan
from tokamake.data.corpus.raw_files import dataset_files
from tokamake.data.indexed.paths import corpus_of
from tokamake.data.mixture.weigh import read_listed_corpora, weigh
from tokamake.errors import UserError


def read(tmp_path: Path, *lines: str, data_root: Path | None = None) -> list[Corpus]:
    weights = tmp_path / "mix.txt"
    weights.write_text("\n".join(lines))
    return read_listed_corpora(weights, data_root)


def test_lines_of_three_columns_are_grouped_by_corpus(tmp_path: Path) -> None:
    stack, wiki = read(
        tmp_path,
        "0.25 a/stack-v2-train-0000_text_document stack-v2-train",
        "",
        "0.5 /data/wiki wiki 0.1:0.9  # comment",
        "0.5 a/stack-v2-train-0001_text_document.bin stack-v2-train",
    )
    assert (stack.corpus, stack.weight, stack.format) == ("stack-v2-train", 0.75, "indexed")
    assert [line.prefix for line in stack.listed] == [
        f"{tmp_path}/a/stack-v2-train-000{number}_text_document" for number in range(2)
    ]
    assert [line.where for line in stack.listed] == [f"{tmp_path}/mix.txt:{n}" for n in (1, 4)]
    assert stack.is_split
    assert (wiki.listed[0].prefix, wiki.listed[0].part) == ("/data/wiki", (0.1, 0.9))
    assert not wiki.is_split


def test_pairs_as_megatron_takes_them_are_named_after_their_files(tmp_path: Path) -> None:
    text = "1 c4/en-0000_text_document 2 c4/en-0001_text_document 3 x/cc-2023-06-0007_text_document"
    corpora = read(
        tmp_path, f"{text} 1 c4-00001-of-00512 1 c4-00002-of-00512", data_root=Path("/data")
    )
    assert [(corpus.corpus, corpus.weight) for corpus in corpora] == [
        *[("en", 3), ("cc-2023-06", 3), ("c4", 2)],
    ]
    assert corpora[0].listed[1].prefix == "/data/c4/en-0001_text_document"


def test_lines_of_weight_zero_are_left_out(tmp_path: Path) -> None:
    (corpus,) = read(tmp_path, "1 a/web-1", "0 a/web-2", "0 b/books-1")
    assert [line.prefix for line in corpus.listed] == [f"{tmp_path}/a/web-1"]


def test_an_address_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("1 hf://datasets/org/texts web\n")
    with pytest.raises(UserError, match=r"list.txt:1: hf://datasets/org/texts: a list takes no a"):
        read_listed_corpora(tmp_path / "list.txt", None)


def test_a_name_that_looks_like_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="corpus: 'web-2023_en': a number of four digits before an"):
        read(tmp_path, "1 a/x web-2023_en")
    (corpus,) = read(tmp_path, "1 a/x web-1_en")
    assert (
        corpus_of(f"{corpus.corpus}-0000_text_document")
        == corpus_of("web-1_en-00000")
        == "web-1_en"
    )


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"weights: .*none\.txt: no such file; fix the path of the"):
        read_listed_corpora(tmp_path / "none.txt", None)


def test_all_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, "1 a/web-1", "-1 a/web-2", "1 a b c d", "1 a/web-1")
    faults = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert faults == [f"{tmp_path}/mix.txt:{number}" for number in (2, 3, 4)]
    with pytest.raises(UserError, match=r"mix\.txt:1: corpus: 'dolma/books': "):
        read(tmp_path, "1 a/books dolma/books")


def test_a_table_and_a_list_have_other_names_and_one_scale(tmp_path: Path) -> None:
    listed = read(tmp_path, "1 a/web-1")
    with pytest.raises(UserError, match=r'mix\.txt:1: corpus "web" is in corpus "web", too; give'):
        check_rows([Corpus(corpus="web", files="x", weight=1), *listed])
    row = Corpus(corpus="books", files="x", temperature=2)
    with pytest.raises(UserError, match=r"temperature 2, but .*mix\.txt:1 has a weight"):
        check_rows([*listed, row])
    check_rows([*listed, Corpus(corpus="books", files="x", epochs=2)])


@pytest.mark.parametrize(
    ("prefix", "found"),
    [
        ("/old/data/web/a-0000_text_document", "new/web/a-0000_text_document"),
        ("/old/data/web/a-0000_text_document.bin", "new/web/a-0000_text_document"),
        ("web/a-0000_text_document", "new/web/a-0000_text_document"),
        ("/old/missing", None),
    ],
)
def test_an_absolute_prefix_of_another_machine_is_found_below_the_data_root(
    tmp_path: Path, prefix: str, found: str | None
) -> None:
    (tmp_path / "new/web").mkdir(parents=True)
    (tmp_path / "new/web/a-0000_text_document.idx").touch()
    [corpus] = read(tmp_path, f"1 {prefix} a", data_root=tmp_path / "new")
    assert corpus.listed[0].prefix == (f"{tmp_path}/{found}" if found else prefix)


def test_an_absolute_prefix_that_exists_stays(tmp_path: Path) -> None:
    for folder in ("old", "new/old"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.bin").touch()
    [corpus] = read(tmp_path, f"1 {tmp_path}/old/a a", data_root=tmp_path / "new")
    assert corpus.listed[0].prefix == f"{tmp_path}/old/a"


def test_a_missing_absolute_prefix_is_not_another_dataset_beside_the_list(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    [corpus] = read(tmp_path, "1 /old/web/a a")
    assert corpus.listed[0].prefix == "/old/web/a"
    with pytest.raises(UserError, match=r"/old/web/a: no such dataset.* in data_root$"):
        dataset_files(corpus)


@pytest.mark.parametrize("given", ["option", "variable", "variable of a folder"])
def test_a_folder_that_has_moved_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    for folder in ("old", "new", "new/old"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.bin").touch()
    old, new = tmp_path / "old", tmp_path / "new"
    if given == "variable of a folder":
        monkeypatch.setenv(ROOT_VARIABLE, str(new))
        (old / "a.bin").unlink()
        expected = new / "old/a"
    elif given == "variable":
        monkeypatch.setenv(ROOT_VARIABLE, f"{old}={new}")
        expected = new / "a"
    else:
        expected = new / "a"
    root = Path(f"{old}={new}") if given == "option" else None
    named = read(tmp_path, f"1 {old}/a a", "1 /other/b a", data_root=root)[0].listed
    assert [listed.prefix for listed in named] == [str(expected), "/other/b"]


@pytest.mark.parametrize(
    ("name", "corpus"),
    [
        ("my_books_0_text_document", "my_books"),
        ("my_books_12_title_sentence", "my_books"),
        ("my-books_3_text_document", "my-books"),
        ("web_2023-0007_text_document", "web_2023"),
        ("books_text_document", "books_text_document"),
    ],
)
def test_a_number_of_a_file_may_follow_an_underscore(name: str, corpus: str) -> None:
    assert corpus_of(f"data/{name}") == corpus


def test_an_index_named_after_the_bin_file_is_named(tmp_path: Path) -> None:
    for name in ("a.bin", "a.bin.idx"):
        (tmp_path / name).touch()
    [corpus] = read(tmp_path, "1 a a")
    with pytest.raises(UserError, match=r"a\.bin\.idx exists; rename it to .*/a\.idx"):
        dataset_files(corpus)


# Their weights


def planned_list(folder: Path, *lines: str) -> dict[str, Path]:
    """Write a list of the datasets pre/a, pre/b ..., and a plan that links to them."""
    weights = folder / "mix.txt"
    weights.write_text("\n".join(lines) + "\n")
    corpora = read_listed_corpora(weights, None)
    merged = []
    for corpus in corpora:
        for number, line in enumerate(corpus.listed):
            name = f"{corpus.corpus}-{number:04d}"
            merged.append(PlannedMerge(name, corpus.corpus, "", (), line.prefix, "stamp"))
    write_plan(folder / "plan.json", Plan({}, "", (), (), (), tuple(merged), ()))
    return {"weights": weights, "plan": folder / "plan.json"}


def listed(folder: Path, *lines: str, sizes: list[tuple[str, int]], **options: Any) -> list[str]:
    """Run `weigh` on a list; return the lines that it writes."""
    files = planned_list(folder, *lines)
    described = []
    counts: dict[str, int] = {}
    for corpus, size in sizes:
        number = counts[corpus] = counts.get(corpus, -1) + 1
        prefix = f"merged/{corpus}-{number:04d}"
        described.append({"data_prefix": prefix, "corpus": corpus, "total_num_tokens": size})
    (folder / "metadata.json").write_text(json.dumps(described))
    output = folder / "weights.txt"
    weigh(metadata=folder / "metadata.json", output=output, **files, **options)
    return output.read_text().splitlines()


def test_a_list_keeps_its_weights_to_the_last_bit(tmp_path: Path) -> None:
    draw = random.Random(7)
    weights = [draw.random() * 10 ** draw.randint(-9, 9) for _ in range(40)]
    lines = [f"{weight!r} pre/{n} {'ab'[n % 2]}" for n, weight in enumerate(weights)]
    written = listed(tmp_path, *lines, sizes=[("ab"[n % 2], n * 9) for n in range(40)])
    assert [float(line.split()[0]) for line in written] == weights


def test_parts_of_a_list_are_kept(tmp_path: Path) -> None:
    written = listed(tmp_path, "2.0 pre/x a 0.25:0.5", "1.0 pre/y b", sizes=[("a", 5), ("b", 9)])
    assert written == ["2.0 merged/a-0000 a 0.25:0.5", "1.0 merged/b-0000 b"]


def test_a_table_and_a_list_share_one_scale(tmp_path: Path) -> None:
    table = write_table(tmp_path, {"t": {"weight": 2}})
    lines = ["0.5 pre/x a", "1.5 pre/y a"]
    sizes = [("a", 5), ("a", 1), ("t", 30), ("t", 10)]
    written = listed(tmp_path, *lines, sizes=sizes, corpora=table)
    assert [float(line.split()[0]) for line in written] == [0.125, 0.375, 0.375, 0.125]
    with pytest.raises(UserError, match=r"mix\.txt:1: corpus \"t\" is in .*corpora\.tsv:2, too"):
        listed(tmp_path, "1 pre/x t", sizes=sizes, corpora=table)


def test_two_runs_may_list_a_dataset_with_other_weights_and_corpora(tmp_path: Path) -> None:
    mine = planned_list(tmp_path, "9 pre/x en 0.5:1", "1 pre/y en")
    prefix = str(tmp_path / "pre/x")
    plan = read_plan(mine["plan"])
    other = PlannedMerge("english-0000", "english", "", (), prefix, "stamp")
    write_plan(mine["plan"], plan._replace(merged=(*plan.merged, other)))
    described = [
        {"data_prefix": f"merged/{name}", "corpus": name.partition("-")[0], "total_num_tokens": 5}
        for name in ("en-0000", "en-0001", "english-0000")
    ]
    (tmp_path / "metadata.json").write_text(json.dumps(described))
    output = tmp_path / "weights.txt"
    weigh(metadata=tmp_path / "metadata.json", output=output, leave_out=("english",), **mine)
    assert output.read_text() == "9.0 merged/en-0000 en 0.5:1.0\n1.0 merged/en-0001 en\n"


def test_mistakes_of_a_list_are_refused(tmp_path: Path) -> None:
    files = planned_list(tmp_path, "1 pre/x a")
    with pytest.raises(UserError, match='corpus "a" has no token; remove'):
        listed(tmp_path, "1 pre/x a", sizes=[("a", 0)])
    output = {"metadata": tmp_path / "metadata.json", "output": tmp_path / "weights.txt"}
    with pytest.raises(UserError, match="--plan: missing; with --weights"):
        weigh(weights=files["weights"], **output)
    with pytest.raises(UserError, match="--corpora: missing"):
        weigh(**output)
    files["weights"].write_text("1 pre/z a\n")
    with pytest.raises(UserError, match=r"mix\.txt:1: .*pre/z: not in .*plan\.json; plan again"):
        weigh(**files, **output)
