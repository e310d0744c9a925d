"""Conversion between all formats and layouts keeps every bit."""

import json
import random as chances
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_folder, megatron_names
from tests.support.families import FAMILIES, assert_same, weights
from tests.support.programs import torch_python
from tokamake import plugins
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors import copy
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout, Target
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import pickle_reader
from tokamake.config.model import FORMATS
from tokamake.errors import UserError


@pytest.mark.grid
def test_random_chains_of_conversions_keep_every_bit(tmp_path: Path) -> None:
    random, refused = chances.Random(0), 0
    known: dict[str, list[Path]] = {}
    for name in ("llama-gqa", "gpt_bigcode", "gpt2-untied"):
        hf_folder.write(tmp_path / name, FAMILIES[name], weights(FAMILIES[name]))
        known[name] = [tmp_path / name]
    for number in range(60):
        so_far = [*known.values()][number % 3]
        begin = open_any(random.choice(so_far))
        kind = random.choice(plugins.names(FORMATS))
        target = Target(random_layout(random, kind))
        folder = tmp_path / f"walk-{number}"
        heads = begin.architecture.num_key_value_heads
        if heads > 1 and heads % target.layout.tensor_parallel_size:
            refused += 1
            with pytest.raises(UserError, match="does not divide num_key_value_heads"):
                writer.write(folder, begin, kind, target)
            continue
        writer.write(folder, begin, kind, target)
        if kind == "universal":  # All are fp32 there.
            writer.write(folder / "back", open_any(folder), "mds", Target(dtype="bf16"))
            folder = folder / "back"
        assert_same(open_any(folder), begin.architecture)
        so_far.append(folder)
    assert 0 < refused < 20


def random_layout(random: chances.Random, kind: str) -> ParallelLayout:
    tensor, stages = random.choice((1, 2, 4, 8)), random.choice((1, 2, 4))
    if kind == "mds":
        return ParallelLayout(tensor)
    if kind == "universal":
        return ParallelLayout(1, stages)
    if kind == "mds_pipeline":
        return ParallelLayout(tensor, stages)
    if kind == "megatron":
        return ParallelLayout(tensor, stages, random.choice((1, 2)) if 1 < stages < 4 else 1)
    return ParallelLayout()


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


STATES = "global_step0/mp_rank_01_model_states.pt"


def _shorter(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2000])


def _hostile(file: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (file.with_name("ran"),)

    torch.save({"module": Hostile()}, file)


DAMAGES: dict[str, tuple[str, str, Any, str]] = {
    "cut off": ("mds", STATES, _shorter, "mp_rank_01_model_states.pt: damaged"),
    "hostile": ("mds", STATES, _hostile, "holds more than tensors and plain values"),
    "no rank": (
        "pipe",
        "global_step0/layer_03-model_00-model_states.pt",
        Path.unlink,
        "has 6 files layer_.*-model_00, a model of 4 layers has 7",
    ),
    "no part": (
        "megatron",
        "iter_0000000/mp_rank_00/model_optim_rng.pt",
        Path.unlink,
        "mp_rank_00/model_optim_rng.pt: no such file",
    ),
    "another model's": (
        "mds",
        STATES,
        lambda file: torch.save({"module": {"a": torch.zeros(3)}}, file),
        "tensor .* is missing",
    ),
    "no last rank": (
        "mds",
        STATES,
        Path.unlink,
        "has files of 1 tensor-parallel rank, its arguments say 2; fetch or write all files",
    ),
    "no stage": (
        "stages",
        "iter_0000000/mp_rank_00_001",
        shutil.rmtree,
        "has files of 1 pipeline-parallel rank, its arguments say 2; fetch or write all files",
    ),
    "wrong latest": (
        "mds",
        "latest",
        lambda file: file.write_text("global_step9"),
        r"latest: names global_step9, which is missing; name an existing one \(global_step0\)",
    ),
}


def with_layers(file: Path, number_of: dict[int, int]) -> None:
    """Leave some layers in a stage's file, under other numbers."""
    state = torch.load(file, weights_only=False)
    encoder, kept = state["model"]["language_model"]["encoder"], {}
    for name, tensor in encoder.items():
        module, number, rest = (*name.split(".", 2), "", "")[:3]
        if module != "layers":
            kept[name] = tensor
        elif int(number) in number_of:
            kept[f"layers.{number_of[int(number)]}.{rest}"] = tensor
    state["model"]["language_model"]["encoder"] = kept
    torch.save(state, file)


@pytest.mark.parametrize(
    ("left", "message"),
    [
        # Stages of one layer and three, of which the last or the first one is gone.
        (
            [{0: 0}, {0: 0, 1: 1}],
            r"has 3 layers \(its stages have 1, 2; the fewest are in .*00_000/",
        ),
        ([{0: 0, 1: 1}, {}], r"has 2 layers \(its stages have 2, 0; the fewest are in .*00_001/"),
        ([{0: 0, 1: 1}, {1: 1}], "00_001/model_optim.* has layers up to 1, but none of number 0"),
    ],
)
def test_stages_with_missing_layers_are_named(
    left: list[dict[int, int]], message: str, folder: Path, tmp_path: Path
) -> None:
    broken = copied(folder / "stages", tmp_path / "broken")
    for stage, number_of in enumerate(left):
        file = broken / f"iter_0000000/mp_rank_00_{stage:03d}/model_optim_rng.pt"
        with_layers(file, number_of)
    with pytest.raises(UserError, match=message):
        open_any(broken)


@pytest.mark.parametrize("name", ["megatron", "stages"])
def test_each_file_of_megatron_lm_is_unpickled_once(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, files = pickle_reader.read, list[Path]()

    def reads(file: Path, remedy: str) -> Any:
        files.append(file)
        return read(file, remedy)

    monkeypatch.setattr(pickle_reader, "read", reads)
    open_any(folder / name)
    assert sorted(files) == sorted((folder / name).rglob("*.pt"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_error_that_names_the_file(damage: str, folder: Path, tmp_path: Path) -> None:
    name, file, spoil, message = DAMAGES[damage]
    broken = copied(folder / name, tmp_path / "broken")
    spoil(broken / file)
    with pytest.raises(UserError, match=message):
        convert(source=broken, target=tmp_path / "out", format="hf")
    assert not (tmp_path / "out").exists()
    assert not (broken / file).with_name("ran").exists()


def test_impossible_conversions_are_refused(folder: Path, tmp_path: Path) -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(UserError, match=message):
            convert(**{"source": folder / "hf", "target": tmp_path / "a", **options})
        assert not (tmp_path / "a").exists()

    refused("is not split this way", format="hf", tensor_parallel_size=2)
    refused("give 1 or more", format="mds", tensor_parallel_size=0)
    refused("--workers -1: give 1 or more, or 0", format="mds", workers=-1)
    refused("does not divide 4 layers", format="megatron", pipeline_parallel_size=3)
    refused("does not divide 4 layers", format="megatron", pipeline_parallel_size=8)
    refused(
        "--pipeline-parallel-size 5: more than the model's 4 layers; give 4 or less",
        format="mds-pipeline",
        pipeline_parallel_size=5,
    )
    assert not (tmp_path / ".a.converting").exists()
    refused("give --pipeline-parallel-size, too", format="megatron", virtual_pipeline_size=2)
    refused("give --zero-stage, too", format="mds", data_parallel_size=2)
    refused("no ZeRO partitions; leave it out, or", format="universal", zero_stage=1)
    refused("has no optimizer states for --zero-stage 1", format="megatron", zero_stage=1)
    refused(
        "--zero-stage 2: Megatron-LM's distributed optimizer shares",
        format="megatron",
        zero_stage=2,
    )
    refused("has no optimizer states for --zero-stage 1", format="mds-pipeline", zero_stage=1)
    refused("no such folder", format="mds", source=tmp_path / "none")
    with pytest.raises(UserError, match="already exists"):
        convert(source=folder / "hf", target=folder / "mds", format="mds")
    assert open_any(folder / "mds").layout.tensor_parallel_size == 2


def test_an_interrupted_conversion_continues(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, architecture = open_any(folder / "mds"), FAMILIES["llama"]
    copy_original, keys = copy._copy_tensor, list[str]()

    def copy_tensor(key: str, *rest: Any, **options: Any) -> bool:
        keys.append(key)
        if len(keys) == 20:
            raise KeyboardInterrupt
        return copy_original(key, *rest, **options)

    monkeypatch.setattr(copy, "_copy_tensor", copy_tensor)
    monkeypatch.setattr(writer, "_SYNC_BYTES", 0)
    with pytest.raises(KeyboardInterrupt):
        writer.write(tmp_path / "a", source, "megatron", Target(ParallelLayout(2)))
    assert not (tmp_path / "a").exists()
    before = len(keys)
    writer.write(tmp_path / "a", source, "megatron", Target(ParallelLayout(2)))
    # Some of the first were done and noted, and are not moved again.
    assert len(keys) - before < len(weights(architecture)) - 5
    assert_same(open_any(tmp_path / "a"), architecture)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


STOPPED = """
import itertools, os, signal
from tokamake.checkpoint.tensors import copy
from tokamake.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background has none.
move, numbers = copy._copy_tensor, itertools.count(1)

def moves(*arguments, **named):
    if next(numbers) == 10:  # of those of all threads
        os.kill(os.getpid(), signal.SIGINT)
    return move(*arguments, **named)

copy._copy_tensor = moves
main()
"""


def test_ctrl_c_prints_one_line_and_the_same_command_continues(
    folder: Path, tmp_path: Path
) -> None:
    arguments = ["convert", "--from", str(folder / "hf"), "--to", "a", "--format", "mds"]

    def run(*python: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [torch_python(), *python, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    stopped = run("-c", STOPPED)
    assert stopped.returncode == 130
    assert stopped.stderr == "tokamake convert: stopped; the same command continues\n"
    assert not (tmp_path / "a").exists()
    assert run("-m", "tokamake").returncode == 0
    assert_same(open_any(tmp_path / "a"), FAMILIES["llama"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_different_conversion_starts_over(folder: Path, tmp_path: Path) -> None:
    growing = tmp_path / ".a.converting" / "notes"
    growing.mkdir(parents=True)
    (growing / "plan.json").write_text(json.dumps({"digest": "other", "extents": []}))
    convert(source=folder / "hf", target=tmp_path / "a", format="mds")
    assert_same(open_any(tmp_path / "a"), FAMILIES["llama"])


def test_convert_prints_what_is_left_behind(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mds = open_any(folder / "mds")
    known = {key: mds.source.read(key) for key in mds.source}
    states = {key.replace("model.", "optimizer.exp_avg.", 1): known[key] for key in known}
    begin = replace(mds, source=TensorSource([], {}, in_memory={**known, **states}))
    writer.write(tmp_path / "native", begin, "native", Target())
    convert(source=tmp_path / "native", target=tmp_path / "a", format="hf")
    assert "left behind: optimizer.exp_avg\n" in capsys.readouterr().out
    convert(source=folder / "mds", target=tmp_path / "b", format="hf")
    assert "left behind" not in capsys.readouterr().out


def test_universal_keeps_the_notes_of_a_run(tmp_path: Path) -> None:
    known = {f"model.{key}": tensor for key, tensor in weights(FAMILIES["llama"]).items()}
    moments = {key.replace("model.", "optimizer.exp_avg.", 1): known[key] for key in known}
    notes = {"optimizer": "lion", "loss_scale": [512.0, 3], "eos_token_id": 5}
    begin = Checkpoint(
        "native",
        tmp_path,
        FAMILIES["llama"],
        TensorSource([], {}, in_memory={**known, **moments}),
        notes=notes,
    )
    writer.write(tmp_path / "universal", begin, "universal", Target())
    assert open_any(tmp_path / "universal").notes == notes
    convert(source=tmp_path / "universal", target=tmp_path / "native", format="native")
    assert notes.items() <= open_any(tmp_path / "native").notes.items()
    # As DeepSpeed writes it, it has none of these.
    file = tmp_path / "universal/global_step0_universal/mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    del state["tokamake"]
    torch.save(state, file)
    assert open_any(tmp_path / "universal").notes == {"eos_token_id": 5}


def test_one_conversion_at_a_time_writes_a_target(folder: Path, tmp_path: Path) -> None:
    with (
        writer._locked(tmp_path / ".a.converting", tmp_path / "a"),
        pytest.raises(UserError, match="a: another conversion writes it"),
    ):
        convert(source=folder / "hf", target=tmp_path / "a", format="mds")
    convert(source=folder / "hf", target=tmp_path / "a", format="mds")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["mds", "mds-pipeline", "megatron", "torch-dist", "native"])
def test_tokens_and_the_generation_config_are_carried_over(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture = FAMILIES["llama"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    tokens = {"eos_token_id": 5, "bos_token_id": 7}
    (tmp_path / "hf/config.json").write_text(json.dumps(config | tokens))
    generation = json.dumps(tokens | {"temperature": 0.5})
    (tmp_path / "hf/generation_config.json").write_text(generation)
    convert(source=tmp_path / "hf", target=tmp_path / "a", format=kind)
    convert(source=tmp_path / "a", target=tmp_path / "b", format="hf")
    for name in ("config.json", "generation_config.json"):
        stated = json.loads((tmp_path / "b" / name).read_text())
        assert (stated["eos_token_id"], stated["bos_token_id"]) == (5, 7)
    assert stated["temperature"] == 0.5
    assert "has no eos_token_id" not in capsys.readouterr().out
    megatron_names.write(tmp_path / "c", "mds", architecture, weights(architecture))
    convert(source=tmp_path / "c", target=tmp_path / "d", format="hf")
    assert "has no eos_token_id" in capsys.readouterr().out
    assert json.loads((tmp_path / "d/config.json").read_text())["eos_token_id"] is None


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "llama-tied", "gpt2-untied"])
def test_megatrons_own_arguments_describe_the_same_model(name: str, tmp_path: Path) -> None:
    architecture = FAMILIES[name]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    for kind in ("mds", "megatron"):
        convert(source=tmp_path / "hf", target=tmp_path / kind, format=kind)  # type: ignore
        (file,) = (tmp_path / kind).rglob("*.pt")
        state = torch.load(file, weights_only=False)
        del state["args"].tokamake
        torch.save(state, file)
        assert_same(open_any(tmp_path / kind), architecture)
