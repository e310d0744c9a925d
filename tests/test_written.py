"""What stands in a conversion's way, and what it goes on with: nothing old, nothing half."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_convert import FAMILIES, assert_same, weights

from tokamake.checkpoint import hugging_face, moving, written
from tokamake.checkpoint.any_format import open_any
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.opened import Layout, Target
from tokamake.errors import UserError


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A Hugging Face checkpoint."""
    architecture = FAMILIES["llama"]
    hugging_face.write(tmp_path / "hf", architecture, weights(architecture))
    return tmp_path / "hf"


def cut_off(start: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_move", stops)
        with pytest.raises(KeyboardInterrupt):
            written.write(target, open_any(start), "mds", Target(Layout(2)))


def test_another_description_is_not_gone_on_with(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(start, tmp_path / "a", monkeypatch)
    text = (start / "config.json").read_text()
    (start / "config.json").write_text(text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 0.5'))
    opened = open_any(start)
    assert opened.architecture.rms_norm_eps == 0.5
    written.write(tmp_path / "a", opened, "mds", Target(Layout(2)))
    assert open_any(tmp_path / "a").architecture.rms_norm_eps == 0.5


def test_killed_after_the_rename_it_is_done_anew_where_the_target_is_gone(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(written, "_remove", stops)
        with pytest.raises(KeyboardInterrupt):
            convert(source=start, target=tmp_path / "a", format="mds")
    shutil.rmtree(tmp_path / "a")
    convert(source=start, target=tmp_path / "a", format="mds")
    assert_same(open_any(tmp_path / "a"), FAMILIES["llama"])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "hf"}


def test_what_is_laid_out_is_on_disk_before_its_plan(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, plans = set[Path](), list[set[Path]]()
    write_text = written.files.write_text

    def writes(path: Path, text: str) -> None:
        if path.name == "plan.json":
            plans.append({*synced})
        write_text(path, text)

    monkeypatch.setattr(written.files, "sync", synced.add)
    monkeypatch.setattr(written.files, "write_text", writes)
    written.write(tmp_path / "a", open_any(start), "mds", Target())
    (before,) = plans
    assert {path.name for path in before} >= {"mp_rank_00_model_states.pt", "latest", "content"}


def test_what_another_conversion_made_meanwhile_is_left(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = written._refuse_other

    def refuses(path: Path) -> None:
        refuse(path)
        path.mkdir()
        (path / "theirs").touch()

    monkeypatch.setattr(written, "_refuse_other", refuses)
    with pytest.raises(UserError, match="a: is there already; name another folder"):
        convert(source=start, target=tmp_path / "a", format="mds")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["theirs"]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "hf"}


def test_what_is_in_the_way_is_named(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/a: .*file is a file, not a folder; name another"):
        convert(source=start, target=tmp_path / "file/a", format="mds")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link: is there already; name another folder"):
        convert(source=start, target=tmp_path / "link", format="mds")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(UserError, match=r"[\d,]+ bytes are wanted there and 1,000 are free;"):
            convert(source=start, target=tmp_path / "a", format="mds")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "file", "link"}
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    convert(source=start, target=Path(), format="mds")
    assert_same(open_any(tmp_path / "empty"), FAMILIES["llama"])


@pytest.mark.parametrize("name", ["mds", "mds_pipeline", "megatron"])
def test_ranks_of_different_steps_are_refused(name: str, start: Path, tmp_path: Path) -> None:
    layout = Layout(1 if name == "mds_pipeline" else 2, 2 if name == "mds_pipeline" else 1)
    opened = open_any(start)
    for folder, step in (("early", 10), ("late", 20)):
        at = replace(opened, progress=replace(opened.progress, iteration=step))
        written.write(tmp_path / folder, at, name, Target(layout))
    (late,) = (tmp_path / "late").rglob("*mp_rank_01*")
    (early,) = (tmp_path / "early").rglob("*mp_rank_01*")
    shutil.rmtree(early) if early.is_dir() else early.unlink()
    late.rename(early)
    with pytest.raises(UserError, match=r"mp_rank_01.*: is of step 20 .*mp_rank_00.* of step 10"):
        open_any(tmp_path / "early")
