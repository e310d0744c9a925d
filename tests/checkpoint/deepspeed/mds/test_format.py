"""The format `mds`: bit-exact in both directions, with the layout of Megatron-DeepSpeed."""

import argparse
import hashlib
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support import gpts, hf_folder, llamas, megatron_names
from tests.support.grids import params
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Progress
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

MODELS = {
    **{f"llama-{llamas.label(shape)}": shape for shape in llamas.ARCHITECTURES},
    "llama-biased": llamas.BIASED,
    **gpts.ARCHITECTURES,
}
GQA = llamas.ARCHITECTURES[5]
STATES = Path("global_step0") / "mp_rank_00_model_states.pt"


def _hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {
        key: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for key, tensor in tensors.items()
    }


ROUND_TRIPS = [*product(MODELS, (torch.float32, torch.bfloat16))]
QUICK_TRIPS = [*ROUND_TRIPS[::4], *ROUND_TRIPS[3::4]]
"""Each model in one dtype, in turn."""


@pytest.mark.parametrize("case", params(ROUND_TRIPS, QUICK_TRIPS), ids=str)
def test_a_round_trip_through_mds_keeps_every_bit_and_the_logits_of_transformers(
    case: tuple[str, torch.dtype], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    name, dtype = case
    family = llamas if MODELS[name].family == "llama" else gpts
    model = family.reference(MODELS[name], dtype)
    model.save_pretrained(tmp_path / "hf")
    convert(source=tmp_path / "hf", target=tmp_path / "mds", format="mds")
    checkpoint = open_any(tmp_path / "mds")
    assert (checkpoint.architecture, checkpoint.progress.iteration) == (MODELS[name], 0)
    for key, tensor in hf_folder.read(tmp_path / "hf")[1].items():
        assert torch.equal(checkpoint.source.read(f"model.{key}"), tensor), key
    convert(source=tmp_path / "mds", target=tmp_path / "back", format="hf")
    written = load_file(tmp_path / "back/model.safetensors")
    assert _hashes(written) == _hashes(load_file(tmp_path / "hf/model.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert type(loaded) is type(model)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():  # `train()` is fine, since there is no dropout
        assert loaded.dtype == dtype
        assert torch.equal(loaded.train()(tokens).logits, model.train()(tokens).logits)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_have_the_names_order_and_padding_of_megatron(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(MODELS[name], 1)
    megatron_names.write(tmp_path / "a", "mds", MODELS[name], tensors)
    state = torch.load(tmp_path / "a" / STATES, weights_only=False)
    stored = dict(torch_archive.leaves(state["module"]))
    expected = megatron_names.megatron_tensors(MODELS[name], tensors)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[key], tensor) for key, tensor in expected.items())


def test_rows_of_fused_attention_in_the_oracle() -> None:
    # Two groups of two queries, of width 16.
    assert [megatron_names.rows_of_fused(GQA)[row] for row in (0, 16, 32, 48, 64, 112, 127)] == [
        *[("q", 0), ("q", 16), ("k", 0), ("v", 0), ("q", 32), ("v", 16), ("v", 31)]
    ]


def test_files_have_the_arguments_of_megatron(tmp_path: Path) -> None:
    megatron_names.write(tmp_path / "a", "mds", GQA, random_tensors(GQA, 1))
    assert (tmp_path / "a" / "latest").read_text() == "global_step0"
    assert (tmp_path / "a" / "latest_checkpointed_iteration.txt").read_text() == "0"
    state = torch.load(tmp_path / "a" / STATES, weights_only=False)
    arguments = vars(state.pop("args"))
    assert state.pop("module").keys() == {"language_model"}
    assert {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "tokens": 0,
        "global_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
    }.items() <= state.items()
    expected = {
        "num_layers": 3,
        "hidden_size": 64,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "padded_vocab_size": 256,
        "make_vocab_size_divisible_by": 128,
        "rope_theta": 5000.0,
        "untie_embeddings_and_output_weights": True,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_pipeline_parallel": True,
        "consumed_train_tokens": 0,
    }
    assert expected.items() <= arguments.items()
    assert Architecture(**arguments["tokamake"]) == GQA


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", (True, False, "absolute", False)),
        ("starcoder2", (False, True, "rotary", False)),
        ("bloom", (False, False, "alibi", True)),
    ],
)
def test_files_of_gpts_have_the_arguments_of_megatron(
    tmp_path: Path, name: str, expected: tuple[Any, ...]
) -> None:
    megatron_names.write(tmp_path / "a", "mds", MODELS[name], random_tensors(MODELS[name], 1))
    args = vars(torch.load(tmp_path / "a" / STATES, weights_only=False)["args"])
    names = ("add_position_embedding", "use_rotary_position_embeddings", "position_embedding_type")
    assert tuple(args[key] for key in (*names, "embed_layernorm")) == expected
    assert args["normalization"] == "layernorm"
    assert args["layernorm_epsilon"] == 1e-6
    assert args["add_bias_linear"]
    assert not args["swiglu"]


def test_the_file_latest_decides_which_step_is_read(tmp_path: Path) -> None:
    first, later = random_tensors(GQA, 1), random_tensors(GQA, 2)
    megatron_names.write(tmp_path / "a", "mds", GQA, first)
    megatron_names.write(tmp_path / "b", "mds", GQA, later, Progress(7, 0, 70))
    (tmp_path / "b/global_step7").rename(tmp_path / "a/global_step7")
    assert open_any(tmp_path / "a").progress == Progress()
    (tmp_path / "a/latest").write_text("global_step7\n")
    checkpoint = open_any(tmp_path / "a")
    assert checkpoint.progress == Progress(7, 0, 70)
    tensors = {key: checkpoint.source.read(f"model.{key}") for key in later}
    assert _hashes(tensors) == _hashes(later)


class Custom:
    """A class that reading a checkpoint must not run."""


def _edited(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        state = torch.load(folder / STATES, weights_only=False)
        edit(state)
        torch.save(state, folder / STATES)

    return change


def _with_shape(**values: Any) -> Callable[[Path], None]:
    return _edited(lambda state: state["args"].tokamake.update(values))


def _edited_encoder(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return _edited(lambda state: edit(state["module"]["language_model"]["encoder"]))


NORM = "final_layernorm.weight"
REMEDY = "fetch or write the checkpoint again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "latest").write_text(""), r"latest: '' is not the name .*"),
        (lambda f: (f / "latest").write_text("../x"), r"latest: '\.\./x' is not the name of"),
        (lambda f: (f / "latest").write_bytes(b"\xff"), r"latest: names .*, which is missing"),
        (lambda f: (f / STATES).unlink(), r"latest names global_step0, which has no file of the f"),
        (lambda f: os.truncate(f / STATES, 9000), rf"model_states\.pt: damaged.*; {REMEDY}"),
        (lambda f: os.truncate(f / STATES, 0), rf"model_states\.pt: damaged.*; {REMEDY}"),
        (lambda f: (f / STATES).write_text("text"), rf"model_states\.pt: .*; {REMEDY}"),
        (lambda f: torch.save(torch.ones(1), f / STATES), r"holds a tensor, not a checkpoint"),
        (_edited(lambda s: s.update(module=Custom())), r"holds more than tensors and plain values"),
        (_edited(lambda s: s.pop("args")), r"args\.num_attention_heads: missing; give"),
        (_edited(lambda s: s.update(args=argparse.Namespace())), r"args\.num_attention_heads: mis"),
        (_edited(lambda s: s.update(module=None)), r"has no word_embeddings\.weight; give"),
        (_with_shape(hidden_size=0), r"args\.tokamake: hidden_size: 0"),
        (_with_shape(num_hidden_layers=4), rf"layers\.3\..* \(and 5 more\) is missing; {REMEDY}"),
        (
            _with_shape(num_hidden_layers=2),
            r"layers\.2\..* \(and 5 more\) is not part of the model",
        ),
        (_with_shape(tie_word_embeddings=True), r"output_layer\.weight is not part of the model"),
        (
            _with_shape(intermediate_size=50),
            r"h_to_4h\.weight has shape \[96, 64\], .* \[100, 64\]; fetch or",
        ),
        (_edited_encoder(lambda e: e.pop(NORM)), rf"final_layernorm\.weight is missing; {REMEDY}"),
    ],
)
def test_broken_folders_are_one_line_errors(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "a"
    megatron_names.write(folder, "mds", GQA, random_tensors(GQA, 1))
    change(folder)
    with pytest.raises(UserError, match=message) as error:
        open_any(folder)
    assert str(error.value).startswith(str(folder))
    assert "\n" not in str(error.value)


def test_a_vocabulary_larger_than_the_stored_embedding_is_an_error(tmp_path: Path) -> None:
    megatron_names.write(tmp_path / "a", "mds", GQA, random_tensors(GQA, 1))
    _with_shape(vocab_size=400)(tmp_path / "a")
    with pytest.raises(UserError, match="has 16,384 of 25,600 elements of tensor "):
        open_any(tmp_path / "a")
