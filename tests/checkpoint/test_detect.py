"""Errors for checkpoints that cannot be opened: a complete step, odd files and odd values."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_folder, llamas, megatron_names
from tests.support.families import FAMILIES, weights
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import list_files, open_any
from tokamake.checkpoint.inspect import inspect
from tokamake.checkpoint.tensors.checkpoint import Progress
from tokamake.errors import UserError

SHAPE = llamas.ARCHITECTURES[5]
FORMATS = {
    # name, folder of a step, pointer file
    "native": ("global_step{}", "latest"),
    "mds": ("global_step{}", "latest"),
    "mds_pipeline": ("global_step{}", "latest"),
    "universal": ("global_step{}_universal", "latest_universal"),
    "megatron": ("iter_{:07}", "latest_checkpointed_iteration.txt"),
    "torch_dist": ("iter_{:07}", "latest_checkpointed_iteration.txt"),
}
Steps = Callable[[Path, str], dict[int, Path]]
STATES = Path("global_step0/mp_rank_00_model_states.pt")
RANK = Path("iter_0000000/mp_rank_00")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Function that writes checkpoints of steps 4, 8 and 12; the pointer file names step 12."""

    @cache
    def made(name: str) -> Path:
        root, tensors = tmp_path_factory.mktemp(name), random_tensors(SHAPE, 1)
        for step in (4, 8, 12):
            megatron_names.write(root / f"{step}", name, SHAPE, tensors, Progress(step, 0, 0))
            shutil.copytree(root / f"{step}", root / "all", dirs_exist_ok=True)
        return root / "all"

    def write(root: Path, name: str) -> dict[int, Path]:
        shutil.copytree(made(name), root)
        return {step: root / FORMATS[name][0].format(step) for step in (4, 8, 12)}

    return write


def truncate(folder: Path) -> None:
    """Truncate all files with tensors."""
    for file in folder.rglob("*"):
        if file.suffix in (".pt", ".distcp"):
            file.write_bytes(file.read_bytes()[:40])


@pytest.mark.parametrize("name", FORMATS)
def test_a_pointer_file_names_nothing_outside_its_folder(
    name: str, steps: Steps, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    folder = steps(root, name)[12]
    moved = tmp_path / "outside" / folder.name
    moved.parent.mkdir()
    folder.rename(moved)
    for outside in (str(moved), f"../outside/{moved.name}", "..", "a" * 300):
        (root / FORMATS[name][1]).write_text(outside)
        with pytest.raises(UserError, match="is not the name of a folder") as error:
            open_any(root)
        assert str(error.value).startswith(f"{root / FORMATS[name][1]}: ")
        assert list_files(root) == []


@pytest.mark.parametrize("damage", [truncate, pytest.param(shutil.rmtree, marks=pytest.mark.grid)])
@pytest.mark.parametrize("name", FORMATS)
def test_the_newest_complete_step_is_named(
    name: str, damage: Any, steps: Steps, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    folders = steps(root, name)
    assert open_any(root).path == folders[12]
    damage(folders[12])

    def messages(path: Path) -> list[str]:
        texts = []
        for read in (lambda: inspect(path), lambda: convert(source=path, target=out, format="hf")):
            with pytest.raises(UserError) as error:
                read()
            texts.append(str(error.value))
            assert "\n" not in texts[-1]
        return texts

    out = tmp_path / "out"
    of_inspect, of_convert = messages(root)
    assert of_inspect == of_convert
    assert of_inspect.endswith(f", or give {folders[8]}, which is complete")
    assert messages(folders[12])[0].endswith(f", or give {folders[8]}, which is complete")
    truncate(folders[8])
    assert messages(root)[0].endswith(f", or give {folders[4]}, which is complete")
    convert(source=folders[4], target=out, format="hf")
    shutil.rmtree(folders[4])
    assert "which is complete" not in messages(root)[0]


@pytest.mark.parametrize("name", ["universal", "megatron"])
def test_a_missing_step_is_named(name: str, steps: Steps, tmp_path: Path) -> None:
    shutil.rmtree(steps(tmp_path / "root", name)[12])
    folder, pointer = FORMATS[name]
    with pytest.raises(UserError, match=f"here {pointer} names {folder.format(12)}, which is miss"):
        open_any(tmp_path / "root")


def test_no_other_step_is_named_for_a_folder_without_checkpoint(
    steps: Steps, tmp_path: Path
) -> None:
    steps(tmp_path / "root", "mds")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none", tmp_path):
        with pytest.raises(UserError) as error:
            open_any(path)
        assert "which is complete" not in str(error.value)


def test_missing_weights_are_reported(tmp_path: Path) -> None:
    megatron_names.write(tmp_path / "a", "hf", SHAPE, random_tensors(SHAPE, 1), Progress())
    (tmp_path / "a/model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"a: has config\.json but no weights .*; fetch them, too, or name"
    ):
        open_any(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-Q4_K_M.gguf", "is a GGUF file of llama.cpp; fetch the model that it was made from"),
        ("adapter_config.json", r"is a LoRA adapter \(PEFT\), no whole model; merge it into"),
        ("consolidated.00.pth", "is a checkpoint in the format of Meta's own code; convert it to"),
        ("tf_model.h5", "is weights of TensorFlow; convert it to"),
    ],
)
def test_weights_of_other_programs_are_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=rf"{tmp_path.name}: {name} {message}"):
        open_any(tmp_path)
    with pytest.raises(UserError, match=rf"{name}: {message}"):
        open_any(tmp_path / name)


@pytest.mark.parametrize("name", ["fp32.pt", "exp_avg.pt"])
def test_a_missing_file_of_a_universal_checkpoint_is_named(name: str, tmp_path: Path) -> None:
    megatron_names.write(tmp_path / "a", "universal", SHAPE, random_tensors(SHAPE, 1), Progress())
    folders = sorted(path for path in tmp_path.glob("a/*/zero/*") if path.is_dir())
    for folder in folders:  # as if it had optimizer states
        shutil.copy(folder / "fp32.pt", folder / "exp_avg.pt")
    open_any(tmp_path / "a")
    parameter = next(folder for folder in folders if folder.name.endswith("query_key_value.weight"))
    (parameter / name).unlink()
    with pytest.raises(UserError, match=f"query_key_value.weight/{name}: no such file; fetch or"):
        open_any(tmp_path / "a")


@pytest.mark.parametrize("name", [*FORMATS, "hf"])
def test_list_files_includes_all_files_that_are_read(name: str, tmp_path: Path) -> None:
    megatron_names.write(tmp_path / "a", name, SHAPE, random_tensors(SHAPE, 1), Progress())
    if name != "hf":
        (tmp_path / "a/config.json").write_text("{}")  # a file of another program
    files = {extent.file for extent in open_any(tmp_path / "a").source.extents}
    assert files
    assert files <= {*list_files(tmp_path / "a")}


@pytest.mark.parametrize("name", ["hf", "mds"])
def test_inspect_prints_steps_if_there_are_any(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron_names.write(
        tmp_path / "a", name, SHAPE, random_tensors(SHAPE, 1), Progress(7, 70, 700)
    )
    inspect(tmp_path / "a")
    output = capsys.readouterr().out
    assert ("progress      step 7, 70 samples, 700 tokens" in output) == (name == "mds")
    assert ("progress" in output) == (name == "mds")


def test_an_older_step_is_named_for_one_with_a_flipped_bit(tmp_path: Path) -> None:
    hf_folder.write(tmp_path / "hf", SHAPE, random_tensors(SHAPE, 1))
    convert(source=tmp_path / "hf", target=tmp_path / "run", format="mds")
    newer = Path(shutil.copytree(tmp_path / "run/global_step0", tmp_path / "run/global_step7"))
    (tmp_path / "run/latest").write_text("global_step7")
    extent = max(open_any(newer).source.extents, key=lambda extent: extent.num_bytes)
    with extent.file.open("r+b") as stream:
        stream.seek(extent.offset)
        byte = stream.read(1)[0]
        stream.seek(extent.offset)
        stream.write(bytes([byte ^ 1]))
    match = r"global_step7/.*checksum of .* is wrong.*, or give .*global_step0, which is complete"
    with pytest.raises(UserError, match=match):
        convert(source=tmp_path / "run", target=tmp_path / "out", format="hf")
    with pytest.raises(UserError, match=match):
        inspect(newer, values=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in each format of Megatron's."""
    root = tmp_path_factory.mktemp("odd")
    for kind in ("mds", "mds_pipeline", "megatron", "universal"):
        megatron_names.write(root / kind, kind, FAMILIES["llama"], weights(FAMILIES["llama"]))
    return root


def renamed(folder: Path, pattern: str, suffix: str) -> None:
    for each in folder.glob(pattern):
        each.rename(each.with_name(f"{each.name}{suffix}"))


def changed(**values: Any) -> Callable[[Path], None]:
    """Change values of all ranks' states; those of arguments are called args_NAME."""

    def change(folder: Path) -> None:
        for file in folder.rglob("m*_rank_*"):
            file = file / "model_optim_rng.pt" if file.is_dir() else file
            state = torch.load(file, weights_only=False)
            for name, value in values.items():
                if name.startswith("args_"):
                    setattr(state["args"], name.removeprefix("args_"), value)
                else:
                    state[name] = value
            torch.save(state, file)

    return change


BROKEN = [
    (
        "mds_pipeline",
        lambda f: renamed(f, "*/layer_*", ".partial"),
        r"has no layer_\*-model_\*-model_states\.pt, but layer_01-model_00-model_states\.pt\.part",
    ),
    ("mds", lambda f: renamed(f, "*/mp_rank_*", ".bak"), r"which has no file of the first rank"),
    ("megatron", lambda f: renamed(f, "*/mp_rank_*", ".bak"), r"no checkpoint of a known format"),
    *(
        (kind, changed(**values), message)
        for kind in ("mds", "mds_pipeline", "megatron", "universal")
        for values, message in [
            ({"iteration": "abc"}, r"\.pt: iteration: 'abc': is not a whole number; fetch"),
            ({"iteration": 1.5}, r"\.pt: iteration: 1\.5: is not a whole number"),
            (
                {"args_consumed_train_samples": "abc"},
                r"\.pt: consumed_train_samples: 'abc': is not a whole number",
            ),
        ]
    ),
    *(
        (
            kind,
            changed(checkpoint_version="abc"),
            r"\.pt: checkpoint_version: 'abc': is not a number",
        )
        for kind in ("mds", "megatron")
    ),
    (
        "universal",
        changed(args_hidden_size="abc"),
        r"\.pt: args\.hidden_size: 'abc': is not a whole number",
    ),
]


@pytest.mark.parametrize(("kind", "change", "message"), BROKEN)
def test_odd_content_is_one_error(
    kind: str, change: Callable[[Path], None], message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / kind, tmp_path / kind)
    change(tmp_path / kind)
    with pytest.raises(UserError, match=message) as error:
        open_any(tmp_path / kind)
    assert str(error.value).startswith(str(tmp_path / kind))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("mds", STATES, "mp_rank_00_model_states.pt.bak"),
        ("mds", STATES, "mp_rank_01.bak"),
        (
            "mds_pipeline",
            Path("global_step0/layer_01-model_00-model_states.pt"),
            "layer_01-model_01-model_states.pt.partial",
        ),
        ("mds_pipeline", STATES, "layer_x-model_y-model_states.pt"),
        ("megatron", RANK, "mp_rank_00.bak"),
        ("megatron", RANK, "mp_rank_01.bak"),
    ],
)
def test_unrelated_files_are_ignored(
    kind: str, name: Path, other: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / kind, tmp_path / kind)
    known = tmp_path / kind / name
    (shutil.copytree if known.is_dir() else shutil.copy)(known, known.with_name(other))
    checkpoint, expected = open_any(tmp_path / kind), open_any(folder / kind)
    assert checkpoint.layout == expected.layout
    key = "model.model.norm.weight"
    assert torch.equal(checkpoint.source.read(key), expected.source.read(key))


def test_an_invalid_number_of_data_parallel_ranks_is_ignored(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mds", tmp_path / "mds")
    changed(dp_world_size="abc")(tmp_path / "mds")
    assert open_any(tmp_path / "mds").layout.data_parallel_size == 1
