"""`mix` adds weights exactly, and keeps prefixes valid from the folder of the output."""

import random
from fractions import Fraction
from pathlib import Path

import pytest
from megatron.core.datasets.utils import get_blend_from_list, normalize

from tokamake.data.mixture.mix import mix
from tokamake.data.mixture.weighting_file import ROOT_VARIABLE, read_weighting_file, scan
from tokamake.errors import UserError


@pytest.fixture(autouse=True)
def no_root_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)


def mixed(output: Path, *parts: object, data_root: Path | None = None) -> dict[str, float]:
    mix([str(part) for part in parts], output=output, data_root=data_root)
    return {entry.prefix: entry.weight for entry in read_weighting_file(output)}


def test_the_lines_of_the_combined_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 x/web-0 web\n1 x/web-1 web\n2 y wiki\n")
    (tmp_path / "b.txt").write_text("5 y.bin wiki\n5 ./z web\n")
    mix(["3", f"{tmp_path}/a.txt", "1", f"{tmp_path}/b.txt"], output=tmp_path / "c.txt")
    assert (tmp_path / "c.txt").read_text() == (
        "0.1875 x/web-0 web\n0.1875 x/web-1 web\n0.5 y wiki\n0.125 z web\n"
    )


@pytest.mark.parametrize("seed", range(30))
def test_weights_are_exact(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    parts: list[object] = []
    expected: dict[str, Fraction] = {}
    lists = [(draw.random() * 10 ** draw.randint(-5, 5), n) for n in range(draw.randint(1, 6))]
    for weight, number in lists:
        names = draw.sample(range(60), draw.randint(1, 50))
        weights = [draw.random() * 10.0 ** draw.randint(-200, 200) for _ in names]
        path = tmp_path / f"{number}.txt"
        entries = zip(weights, names, strict=True)
        path.write_text("".join(f"{w!r} p{name} c{name % 7}\n" for w, name in entries))
        parts += [weight, path]
        for w, name in zip(weights, names, strict=True):
            share = Fraction(w) / sum(map(Fraction, weights))
            share *= Fraction(weight) / sum(Fraction(weight) for weight, _ in lists)
            expected[f"p{name}"] = expected.get(f"p{name}", Fraction()) + share
    weights_by_prefix = mixed(tmp_path / "out.txt", *parts)
    assert weights_by_prefix == {name: float(share) for name, share in expected.items()}
    assert list(weights_by_prefix) == list(expected)
    assert abs(sum(map(Fraction, weights_by_prefix.values())) - 1) < 1e-14


@pytest.mark.parametrize("seed", range(5))
def test_a_single_file_is_normalized_as_in_megatron(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    weights = [draw.random() for _ in range(500)]
    lines = "".join(f"{weight!r} p{n}\n" for n, weight in enumerate(weights))
    (tmp_path / "a.txt").write_text(lines)
    weights_by_prefix = mixed(tmp_path / "out.txt", 7, tmp_path / "a.txt")
    assert list(weights_by_prefix.values()) == pytest.approx(normalize(weights), rel=1e-14, abs=0)


def test_prefixes_are_relative_to_the_folder_of_the_output(tmp_path: Path) -> None:
    (tmp_path / "data/web").mkdir(parents=True)
    (tmp_path / "lists").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data/web")
    (tmp_path / "data/web/w.txt").write_text("1 merged/a web\n1 /elsewhere/b web\n")
    (tmp_path / "data/w.txt").write_text("1 web/merged/a web\n1 c d\n")
    for first in ("data/web/w.txt", "link/w.txt"):
        parts = (1, tmp_path / first, 1, tmp_path / "data/w.txt")
        assert mixed(tmp_path / "lists/out.txt", *parts) == {
            "../data/web/merged/a": 0.5,
            "/elsewhere/b": 0.25,
            "../data/c": 0.25,
        }
    assert list(mixed(tmp_path / "data/out.txt", *parts)) == ["web/merged/a", "/elsewhere/b", "c"]
    assert list(mixed(tmp_path / "link/out.txt", *parts)) == ["merged/a", "/elsewhere/b", "../c"]


def test_one_data_root_for_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/a.txt").write_text("1 x/a a\n")
    (tmp_path / "b.txt").write_text("1 x/a a\n1 b b\n")
    parts = (1, tmp_path / "one/a.txt", 1, tmp_path / "b.txt")
    expected = {"x/a": 0.75, "b": 0.25}
    assert mixed(tmp_path / "out.txt", *parts) != expected
    assert mixed(tmp_path / "out.txt", *parts, data_root=tmp_path / "any") == expected
    monkeypatch.setenv(ROOT_VARIABLE, "/data")
    assert mixed(tmp_path / "out.txt", *parts) == expected


def test_absolute_prefixes_of_a_moved_folder_are_those_of_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "new/web").mkdir(parents=True)
    (tmp_path / "new/web/a.bin").touch()
    (tmp_path / "a.txt").write_text("1 /old/web/a a\n1 /elsewhere/b a\n2 c a\n")
    for root in (f"/old={tmp_path}/new", f"{tmp_path}/new"):
        assert mixed(tmp_path / "out.txt", 1, tmp_path / "a.txt", data_root=Path(root)) == {
            f"{tmp_path}/new/web/a": 0.25,
            "/elsewhere/b": 0.25,
            "c": 0.5,
        }


def test_the_output_may_be_one_of_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 a a\n3 b b\n")
    assert mixed(tmp_path / "a.txt", 2, tmp_path / "a.txt") == {"a": 0.25, "b": 0.75}


def test_invalid_arguments_and_contradictions_are_refused(tmp_path: Path) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("1 x one\n")
    b.write_text("1 y one\n1 x two\n")
    output = tmp_path / "out.txt"
    cases: list[tuple[tuple[object, ...], str]] = [
        ((), "give WEIGHT FILE for each weighting file"),
        ((1, a, 2), "give WEIGHT FILE"),
        ((0, a), r"a\.txt: weight '0'; give a finite number above 0"),
        (("inf", a), r"a\.txt: weight 'inf'"),
        (("nan", a), r"a\.txt: weight 'nan'"),
        ((a, 1), r"1: weight '.*a\.txt'"),
        ((1, tmp_path / "none"), "none: no such file"),
        ((1, a, 1, b), r'b\.txt: x is of corpus "two", but of "one" in .*a\.txt; name one corpus'),
    ]
    for parts, message in cases:
        with pytest.raises(UserError, match=message):
            mixed(output, *parts)
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/c.txt").write_text("1 x x\n")
    with pytest.raises(UserError, match="cannot write 'a b/x': it is empty, has a space"):
        mixed(output, 1, tmp_path / "a b/c.txt")
    assert not output.exists()


def test_megatron_reads_two_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 x web\n3 y wiki\n")
    mix(["1", f"{tmp_path}/a.txt"], output=tmp_path / "c.txt", columns=2)
    text = (tmp_path / "c.txt").read_text()
    assert get_blend_from_list(text.split()) == (["x", "y"], [0.25, 0.75])
    assert [line.entry.weight for line in scan(tmp_path / "c.txt")[0]] == [0.25, 0.75]
    (tmp_path / "a.txt").write_text("1 x web 0.0:0.5\n")
    with pytest.raises(
        UserError, match="the line of x has a range of documents, which two columns cannot express"
    ):
        mix(["1", f"{tmp_path}/a.txt"], output=tmp_path / "d.txt", columns=2)
    assert not (tmp_path / "d.txt").exists()


def test_lines_keep_their_parts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 x web 0.0:0.9\n1 y wiki\n")
    (tmp_path / "b.txt").write_text("1 x web 0.0:0.9\n")
    mix(["1", f"{tmp_path}/a.txt", "1", f"{tmp_path}/b.txt"], output=tmp_path / "c.txt")
    assert (tmp_path / "c.txt").read_text() == "0.75 x web 0.0:0.9\n0.25 y wiki\n"
    (tmp_path / "b.txt").write_text("1 x web\n")
    with pytest.raises(UserError, match=r"b\.txt: x has another part than in .*a\.txt"):
        mix(["1", f"{tmp_path}/a.txt", "1", f"{tmp_path}/b.txt"], output=tmp_path / "c.txt")
