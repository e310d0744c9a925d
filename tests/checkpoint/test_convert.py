"""Conversion between all formats and layouts keeps every bit."""

import argparse
import json
import random as chances
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import megatron_names
from tests.support.families import FAMILIES, assert_same, weights
from tests.support.runs import write_start
from tokamake import plugins
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.hf import hf_folder
from tokamake.checkpoint.inspect import inspect
from tokamake.checkpoint.tensors import copy
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout, Target
from tokamake.checkpoint.tensors.extents import TensorSource
from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.config.architecture import Architecture
from tokamake.config.model import FORMATS
from tokamake.errors import UserError


def chunked(architecture: Architecture, size: int) -> Iterator[dict[str, Tensor]]:
    """What each of several ranks must have, cut from what the one of one rank has."""
    one = megatron_names.megatron_tensors(architecture, weights(architecture))
    for rank in range(size):
        found = {}
        for name, tensor in one.items():
            if "query_key_value" in name or "word_embeddings.w" in name or "output" in name:
                found[name] = tensor.chunk(size)[rank]
            elif "dense_h_to_4h" in name:
                gated = architecture.family == "llama"
                halves = tensor.chunk(2) if gated else (tensor,)
                found[name] = torch.cat([half.chunk(size)[rank] for half in halves])
            elif name.endswith(("dense.weight", "dense_4h_to_h.weight")):
                found[name] = tensor.chunk(size, dim=1)[rank]
            else:
                found[name] = tensor
        yield found


@pytest.mark.parametrize("name", ["llama", "gpt2-untied"])
def test_each_rank_holds_its_chunks_of_the_whole(name: str, tmp_path: Path) -> None:
    # 256 rows are padding for one rank and for two alike.
    architecture = FAMILIES[name]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    writer.write(tmp_path / "mds", open_any(tmp_path / "hf"), "mds", Target(ParallelLayout(2)))
    for rank, expected in enumerate(chunked(architecture, 2)):
        file = tmp_path / "mds" / "global_step0" / f"mp_rank_{rank:02d}_model_states.pt"
        state = torch.load(file, weights_only=False)
        found = dict(torch_archive.leaves(state["module"]))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key
        assert state["args"].tensor_model_parallel_size == 2
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("older", [False, True])
def test_each_order_of_queries_keys_and_values_is_read(
    version: float, older: bool, tmp_path: Path
) -> None:
    architecture, size = FAMILIES["gpt2"], 2
    heads, head = architecture.num_attention_heads // size, architecture.head_dim
    known = argparse.Namespace(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=48,
        num_attention_heads=8,
        max_position_embeddings=32,
        vocab_size=131,
        consumed_train_samples=70,
    )
    for rank, whole in enumerate(chunked(architecture, size)):
        model: dict[str, Any] = {}
        for name, tensor in whole.items():
            if "query_key_value" in name:
                # As of version 2 on: heads, then the three.
                parts = tensor.view(heads, 3, head, *tensor.shape[1:])
                if version == 0:
                    parts = parts.transpose(0, 1)
                elif version < 2:
                    parts = parts.transpose(1, 2)
                tensor = parts.reshape(tensor.shape).contiguous()
            if older:
                name = name.replace(".encoder.", ".transformer.")
                name = name.replace("self_attention", "attention")
            model[name] = tensor
        folder = tmp_path / "iter_0000007" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        state = {"model": model, "args": known, "iteration": 7}
        if version:
            state["checkpoint_version"] = version
        torch.save(state, folder / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    found = open_any(tmp_path)
    assert (found.progress.iteration, found.progress.consumed_samples) == (7, 70)
    assert found.architecture == architecture
    assert_same(found, architecture)


def test_a_pipeline_of_an_earlier_version_is_read_in_its_order(tmp_path: Path) -> None:
    architecture = FAMILIES["gpt2"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    convert(source=tmp_path / "hf", target=tmp_path / "pipe", format="mds-pipeline")
    for path in (tmp_path / "pipe").rglob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        if path.name.startswith("mp_rank"):
            state["checkpoint_version"] = 0
        for name in [name for name in state if "query_key_value" in name]:
            # Version 0 has the three, then heads.
            parts = state[name].view(8, 3, architecture.head_dim, *state[name].shape[1:])
            state[name] = parts.transpose(0, 1).reshape(state[name].shape).contiguous()
        torch.save(state, path)
    assert_same(open_any(tmp_path / "pipe"), architecture)


def test_virtual_stages_hold_their_layers_and_a_tied_head(tmp_path: Path) -> None:
    architecture = FAMILIES["llama-tied"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    arguments: dict[str, Any] = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
    convert(source=tmp_path / "hf", target=tmp_path / "a", format="megatron", **arguments)
    found = open_any(tmp_path / "a")
    assert found.layout == ParallelLayout(1, 2, 2)
    assert_same(found, architecture)
    last = torch.load(
        tmp_path / "a/iter_0000000/mp_rank_00_001/model_optim_rng.pt", weights_only=False
    )
    # Ranks have layers 0 and 2, 1 and 3.
    assert last["model0"]["language_model"].keys() == {"encoder"}
    head = last["model1"]["word_embeddings_for_head"]["weight"]
    assert torch.equal(head[:128], weights(architecture)["model.embed_tokens.weight"])
    fused = last["model1"]["language_model"]["encoder"]["layers.0.mlp.dense_4h_to_h.weight"]
    assert torch.equal(fused, weights(architecture)["model.layers.3.mlp.down_proj.weight"])


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


def test_padding_is_the_mean_of_rows_and_is_removed_again(tmp_path: Path) -> None:
    architecture = FAMILIES["llama"]
    known = weights(architecture, torch.float32)
    hf_folder.write(tmp_path / "hf", architecture, known)
    convert(source=tmp_path / "hf", target=tmp_path / "a", format="mds", tensor_parallel_size=4)
    assert open_any(tmp_path / "a").padded_vocab_size == 512
    for rank in range(4):
        file = tmp_path / "a/global_step0" / f"mp_rank_{rank:02d}_model_states.pt"
        model = torch.load(file, weights_only=False)["module"]["language_model"]
        rows = model["output_layer"]["weight"]
        own = known["lm_head.weight"][rank * 128 : (rank + 1) * 128]
        assert torch.equal(rows[: len(own)], own)
        mean = known["lm_head.weight"].double().mean(0).float()
        assert torch.equal(rows[len(own) :], mean.expand(len(rows) - len(own), -1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one model in several formats; do not write there."""
    root = tmp_path_factory.mktemp("formats")
    architecture = FAMILIES["llama"]
    hf_folder.write(root / "hf", architecture, weights(architecture))
    convert(source=root / "hf", target=root / "mds", format="mds", tensor_parallel_size=2)
    convert(
        source=root / "hf", target=root / "pipe", format="mds-pipeline", pipeline_parallel_size=2
    )
    convert(source=root / "hf", target=root / "megatron", format="megatron", tensor_parallel_size=2)
    convert(source=root / "hf", target=root / "stages", format="megatron", pipeline_parallel_size=2)
    return root


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
    encoder, found = state["model"]["language_model"]["encoder"], {}
    for name, tensor in encoder.items():
        module, number, rest = (*name.split(".", 2), "", "")[:3]
        if module != "layers":
            found[name] = tensor
        elif int(number) in number_of:
            found[f"layers.{number_of[int(number)]}.{rest}"] = tensor
    state["model"]["language_model"]["encoder"] = found
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
    read, asked = pickle_reader.read, list[Path]()

    def reads(file: Path, remedy: str) -> Any:
        asked.append(file)
        return read(file, remedy)

    monkeypatch.setattr(pickle_reader, "read", reads)
    open_any(folder / name)
    assert sorted(asked) == sorted((folder / name).rglob("*.pt"))


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
    refused("no ZeRO partitions; leave it out, or", format="megatron", zero_stage=1)
    refused("has no optimizer states for --zero-stage 1", format="mds-pipeline", zero_stage=1)
    refused("no such folder", format="mds", source=tmp_path / "none")
    with pytest.raises(UserError, match="already exists"):
        convert(source=folder / "hf", target=folder / "mds", format="mds")
    assert open_any(folder / "mds").layout.tensor_parallel_size == 2


def test_an_interrupted_conversion_continues(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, architecture = open_any(folder / "mds"), FAMILIES["llama"]
    move, asked = copy._copy_tensor, list[str]()

    def moves(key: str, *rest: Any) -> bool:
        asked.append(key)
        if len(asked) == 20:
            raise KeyboardInterrupt
        return move(key, *rest)

    monkeypatch.setattr(copy, "_copy_tensor", moves)
    monkeypatch.setattr(writer, "_SYNC_BYTES", 0)
    with pytest.raises(KeyboardInterrupt):
        writer.write(tmp_path / "a", source, "megatron", Target(ParallelLayout(2)))
    assert not (tmp_path / "a").exists()
    before = len(asked)
    writer.write(tmp_path / "a", source, "megatron", Target(ParallelLayout(2)))
    # Some of the first were done and noted, and are not moved again.
    assert len(asked) - before < len(weights(architecture)) - 5
    assert_same(open_any(tmp_path / "a"), architecture)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


STOPPED = """
import itertools, os, signal
from tokamake.checkpoint.tensors import copy
from tokamake.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background has none.
move, numbers = copy._copy_tensor, itertools.count(1)

def moves(*arguments):
    if next(numbers) == 10:  # of those of all threads
        os.kill(os.getpid(), signal.SIGINT)
    return move(*arguments)

copy._copy_tensor = moves
main()
"""


def test_ctrl_c_prints_one_line_and_the_same_command_continues(
    folder: Path, tmp_path: Path
) -> None:
    arguments = ["convert", "--from", str(folder / "hf"), "--to", "a", "--format", "mds"]

    def run(*python: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *python, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    stopped = run("-c", STOPPED)
    assert stopped.returncode == 130
    assert stopped.stderr == "tokamake convert: stopped; the same command goes on\n"
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


def change(folder: Path, rank: str, name: str, value: float) -> None:
    """Write another number into a tensor of a rank, and the file with its checksums anew."""
    (file,) = folder.rglob(f"{rank}_model_states.pt")
    state = torch.load(file, weights_only=False)
    encoder = state["module"]["language_model"]["encoder"]
    next(tensor for key, tensor in encoder.items() if name in key).view(-1)[3] = value
    torch.save(state, file)


@pytest.mark.parametrize("name", ["mds", "pipe", "megatron", "universal", "native", "trained"])
def test_a_flipped_bit_is_detected(name: str, folder: Path, tmp_path: Path) -> None:
    kept = folder / name
    if name in ("universal", "native"):
        kept = tmp_path / "kept"
        convert(source=folder / "hf", target=kept, format=name)  # type: ignore[arg-type]
    elif name == "trained":
        kept = tmp_path / "kept"
        write_start(kept, FAMILIES["llama"], weights(FAMILIES["llama"]))
    broken = copied(kept, tmp_path / "broken")
    inspect(broken, values=True)
    region = max(open_any(broken).source.extents, key=lambda each: each.num_bytes)
    with region.file.open("r+b") as stream:
        stream.seek(region.offset + region.num_bytes // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))
    for look in (
        lambda: inspect(broken, values=True),
        lambda: convert(source=broken, target=tmp_path / "out", format="hf"),
    ):
        with pytest.raises(UserError, match=r"damaged: the checksum of .* is wrong; fetch"):
            look()
    assert not (tmp_path / "out").exists()


def test_inspect_describes_a_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(folder / "pipe", tensors=True, values=True)
    told = capsys.readouterr().out
    for line in (
        "format        Megatron-DeepSpeed, with pipeline",
        "layout        pipeline 2",
        "vocabulary    131, stored as 256 rows",
        "model.layers.3.self_attn.q_proj.weight  [64, 64]  bfloat16",
        "values        all finite; copies on other ranks are alike; checksums hold",
    ):
        assert line in told
    broken = copied(folder / "mds", tmp_path / "broken")
    change(broken, "mp_rank_01", "post_attention_layernorm", 7.0)
    differs = r"mp_rank_01.*: replicated tensor .*layernorm.* differs .*--take-first-copy"
    with pytest.raises(UserError, match=differs):
        inspect(broken, values=True)
    with pytest.raises(UserError, match=differs):
        convert(source=broken, target=tmp_path / "out", format="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
    convert(source=broken, target=tmp_path / "first", format="hf", take_first_copy=True)
    assert_same(open_any(tmp_path / "first"), FAMILIES["llama"])
    change(broken, "mp_rank_00", "dense_h_to_4h", float("nan"))
    with pytest.raises(UserError, match="1 values are NaN or infinite"):
        inspect(broken, values=True)


def test_convert_prints_what_is_left_behind(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mds = open_any(folder / "mds")
    known = {key: mds.source.read(key) for key in mds.source}
    states = {key.replace("model.", "optimizer.exp_avg.", 1): known[key] for key in known}
    begin = replace(mds, source=TensorSource([], {}, {**known, **states}))
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
        TensorSource([], {}, {**known, **moments}),
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


@pytest.mark.parametrize("kind", ["mds", "mds-pipeline", "megatron", "native"])
def test_the_end_of_text_token_is_carried_over(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture = FAMILIES["llama"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    convert(source=tmp_path / "hf", target=tmp_path / "a", format=kind)
    convert(source=tmp_path / "a", target=tmp_path / "b", format="hf")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "b" / name).read_text())["eos_token_id"] == 5
    assert "no end-of-text token" not in capsys.readouterr().err
    megatron_names.write(tmp_path / "c", "mds", architecture, weights(architecture))
    convert(source=tmp_path / "c", target=tmp_path / "d", format="hf")
    assert "no end-of-text token" in capsys.readouterr().err
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
