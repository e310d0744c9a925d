"""The least toxic texts: which, in which order, and what is said about them."""

import json
from pathlib import Path

import pytest

from tokamake.detoxify.select_texts import select_texts
from tokamake.errors import UserError


def write(path: Path, *scores: float | None) -> Path:
    lines = [{"text": f"{path.stem} {n}", "toxicity": score} for n, score in enumerate(scores)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def kept(folder: Path, *paths: Path, **options: float) -> list[str]:
    output = folder / "kept.jsonl"
    select_texts(paths, output=output, summary=folder / "kept.json", **options)
    return [json.loads(line)["text"] for line in output.read_text().splitlines()]


def test_the_least_toxic_half_of_the_scored_texts_is_kept(tmp_path: Path) -> None:
    paths = write(tmp_path / "a.jsonl", 0.9, 0.2, None, 0.4), write(tmp_path / "b.jsonl", 0.2, 0.4)
    first = kept(tmp_path, *paths)
    # Five scores; of the two texts of 0.4, none is among the first two.
    assert sorted(first) == ["a 1", "b 0"]
    assert sorted(kept(tmp_path, *paths, keep=0.6)) == ["a 1", "a 3", "b 0"]
    summary = json.loads((tmp_path / "kept.json").read_text())
    assert (summary["texts"], summary["blank"]) == (6, 1)
    assert summary["scored"]["mean"] == pytest.approx(0.42)
    assert summary["scored"]["above_half"] == pytest.approx(0.2)
    assert summary["kept"] == {
        "number": 3, "mean": pytest.approx(0.8 / 3), "sd": pytest.approx(0.0942809),
        "minimum": 0.2, "maximum": 0.4, "above_half": 0,
    }  # fmt: skip


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[number / 100 for number in range(40)])
    first = kept(tmp_path, path, seed=1)
    assert first == kept(tmp_path, path, seed=1) != kept(tmp_path, path, seed=2)
    assert first != sorted(first)


def test_nothing_to_keep_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", None, 0.5)
    with pytest.raises(UserError, match=r"a.jsonl: 1 of 2 texts have a score, and keep 0.5 of th"):
        kept(tmp_path, path)
    with pytest.raises(UserError, match=r"keep: 1.5: give a share above 0, at most 1"):
        kept(tmp_path, path, keep=1.5)
    path.write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:1: no toxicity; score the file with `tokamake s"):
        kept(tmp_path, path)
