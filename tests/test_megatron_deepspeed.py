"""Megatron-DeepSpeed folders: bit-exact both ways, as Megatron lays them out."""

import argparse
import hashlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llamas import ARCHITECTURES, BIASED, label, reference, tensors_of
from safetensors.torch import load_file, save_file

from tokamake.checkpoint import hugging_face, megatron_deepspeed
from tokamake.checkpoint.megatron import layout as megatron_layout
from tokamake.checkpoint.tensors import from_model, random, to_model
from tokamake.config import Architecture
from tokamake.errors import UserError

GQA = ARCHITECTURES[5]
STATES = Path("global_step0") / "mp_rank_00_model_states.pt"


def _hashes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        key: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for key, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, BIASED], ids=label)
def test_round_trip_keeps_every_bit_and_transformers_logits(
    tmp_path: Path, architecture: Architecture, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    model = reference(architecture, dtype)
    model.save_pretrained(tmp_path / "theirs")
    megatron_deepspeed.write(tmp_path / "megatron", *hugging_face.read(tmp_path / "theirs"))
    found, tensors, iteration = megatron_deepspeed.read(tmp_path / "megatron")
    assert (found, iteration) == (architecture, 0)
    assert _hashes(tensors) == _hashes(tensors_of(model, architecture))
    hugging_face.write(tmp_path / "ours", found, tensors)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, model(tokens).logits)


def _rows_of_fused(architecture: Architecture) -> list[tuple[str, int]]:
    """Which matrix and row each row of query_key_value is, spelled out head by head."""
    width = architecture.head_dim
    per_group = architecture.num_attention_heads // architecture.num_key_value_heads
    rows = []
    for group in range(architecture.num_key_value_heads):
        for query in range(per_group):
            rows += [("q", (group * per_group + query) * width + i) for i in range(width)]
        rows += [("k", group * width + i) for i in range(width)]
        rows += [("v", group * width + i) for i in range(width)]
    return rows


@pytest.mark.parametrize("architecture", ARCHITECTURES[::4], ids=label)
def test_query_key_value_rows_lie_group_by_group(architecture: Architecture) -> None:
    tensors = random(architecture, 1)
    encoder = megatron_layout.to_megatron(architecture, tensors)["language_model"]["encoder"]
    for layer in range(architecture.num_hidden_layers):
        fused = encoder[f"layers.{layer}.self_attention.query_key_value.weight"]
        rows = _rows_of_fused(architecture)
        assert len(fused) == len(rows)
        for row, (part, source) in zip(fused, rows, strict=True):
            weight = tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
            assert torch.equal(row, weight[source])


@pytest.mark.parametrize("architecture", ARCHITECTURES[:4], ids=label)
def test_other_tensors_are_named_and_padded_as_megatrons(architecture: Architecture) -> None:
    tensors = random(architecture, 1)
    module = megatron_layout.to_megatron(architecture, tensors)["language_model"]
    encoder, layer = module["encoder"], "model.layers.2."
    parts = {"embedding", "encoder"} | (
        set() if architecture.tie_word_embeddings else {"output_layer"}
    )
    assert module.keys() == parts
    assert len(encoder) == 6 * 3 + 1
    for theirs, ours in {
        "layers.2.input_layernorm.weight": f"{layer}input_layernorm.weight",
        "layers.2.self_attention.dense.weight": f"{layer}self_attn.o_proj.weight",
        "layers.2.post_attention_layernorm.weight": f"{layer}post_attention_layernorm.weight",
        "layers.2.mlp.dense_4h_to_h.weight": f"{layer}mlp.down_proj.weight",
        "final_layernorm.weight": "model.norm.weight",
    }.items():
        assert torch.equal(encoder[theirs], tensors[ours])
    gate_and_up = encoder["layers.2.mlp.dense_h_to_4h.weight"]
    assert torch.equal(gate_and_up[:48], tensors[f"{layer}mlp.gate_proj.weight"])
    assert torch.equal(gate_and_up[48:], tensors[f"{layer}mlp.up_proj.weight"])
    pairs = [(module["embedding"]["word_embeddings"]["weight"], "model.embed_tokens.weight")]
    if "output_layer" in module:
        pairs.append((module["output_layer"]["weight"], "lm_head.weight"))
    for padded, ours in pairs:
        rows = tensors[ours]
        assert len(padded) == (128 if len(rows) == 128 else 256)
        assert torch.equal(padded[: len(rows)], rows)
        for row in padded[len(rows) :]:
            torch.testing.assert_close(row, rows.mean(dim=0))


def test_file_has_megatrons_arguments(tmp_path: Path) -> None:
    megatron_deepspeed.write(tmp_path / "a", GQA, random(GQA, 1))
    assert (tmp_path / "a" / "latest").read_text() == "global_step0"
    assert (tmp_path / "a" / "latest_checkpointed_iteration.txt").read_text() == "0"
    state = torch.load(tmp_path / "a" / STATES, weights_only=False)
    arguments = vars(state.pop("args"))
    assert state.pop("module").keys() == {"language_model"}
    assert state == {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "tokens": 0,
        "global_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
    }
    expected = {
        "num_layers": 3,
        "hidden_size": 64,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "padded_vocab_size": 256,
        "rope_theta": 5000.0,
        "untie_embeddings_and_output_weights": True,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    assert expected.items() <= arguments.items()
    assert Architecture(**arguments["tokamake"]) == GQA


def test_latest_decides_which_checkpoint_is_read(tmp_path: Path) -> None:
    megatron_deepspeed.write(tmp_path, GQA, random(GQA, 1))
    later = random(GQA, 2)
    (tmp_path / "global_step7").mkdir()
    state = megatron_deepspeed.client_state(GQA, iteration=7, tokens=70)
    module = megatron_layout.to_megatron(GQA, later)
    torch.save({"module": module, **state}, tmp_path / "global_step7" / STATES.name)
    assert megatron_deepspeed.read(tmp_path)[2] == 0
    (tmp_path / "latest").write_text("global_step7\n")
    _, tensors, iteration = megatron_deepspeed.read(tmp_path)
    assert iteration == 7
    assert _hashes(tensors) == _hashes(later)


def _train_with_deepspeed(folder: Path, zero_stage: int, precision: str) -> None:
    """One step on one rank, saved as the trainer does; the weights are kept beside it."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(folder / "store"), 1), rank=0, world_size=1
    )
    import deepspeed

    # As the trainer: else DeepSpeed compiles it, and waits for ever for a compiler killed before.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model: Any = to_model(GQA, random(GQA, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=config,
        dist_init_required=False,
    )
    engine.backward(engine.module.loss(torch.arange(20).view(1, 20)))
    engine.step()
    trained = {key: tensor.clone() for key, tensor in from_model(GQA, engine.module).items()}
    save_file(trained, folder / "trained.safetensors")
    engine.module.state_dict = lambda *_, **__: megatron_layout.to_megatron(GQA, trained)
    state = megatron_deepspeed.client_state(GQA, iteration=1, tokens=19)
    engine.save_checkpoint(str(folder / "training"), client_state=state)
    torch.distributed.destroy_process_group()


@pytest.mark.ranks
@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16")])
def test_reads_what_deepspeed_saves(tmp_path: Path, zero_stage: int, precision: str) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path, zero_stage, precision)
    process = context.Process(target=_train_with_deepspeed, args=arguments)
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0
    architecture, tensors, iteration = megatron_deepspeed.read(tmp_path / "training")
    assert (architecture, iteration) == (GQA, 1)
    trained = load_file(tmp_path / "trained.safetensors")
    assert _hashes(tensors) == _hashes(trained)
    assert not torch.equal(trained["lm_head.weight"].float(), random(GQA, 5)["lm_head.weight"])
    assert {tensor.dtype for tensor in tensors.values()} == {
        torch.bfloat16 if precision == "bf16" else torch.float32
    }


class Custom:
    """Something that no checkpoint should have to execute."""


def _resave(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        state = torch.load(folder / STATES, weights_only=False)
        edit(state)
        torch.save(state, folder / STATES)

    return change


def _shape(**values: Any) -> Callable[[Path], None]:
    return _resave(lambda state: state["args"].tokamake.update(values))


def _encoder(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return _resave(lambda state: edit(state["module"]["language_model"]["encoder"]))


NORM = "final_layernorm.weight"
REMEDY = "import or train the checkpoint again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "latest").unlink(), rf"latest: no such file, .*; {REMEDY}"),
        (lambda f: (f / "latest").write_text(""), rf"latest: '' is not the name .*; {REMEDY}"),
        (lambda f: (f / "latest").write_text("../x"), r"latest: '\.\./x' is not the name of"),
        (lambda f: (f / "latest").write_bytes(b"\xff"), r"model_states\.pt: no such file"),
        (lambda f: (f / STATES).unlink(), rf"model_states\.pt: no such file, .*; {REMEDY}"),
        (lambda f: os.truncate(f / STATES, 9000), rf"model_states\.pt: damaged \(.*; {REMEDY}"),
        (lambda f: os.truncate(f / STATES, 0), rf"model_states\.pt: damaged \(.*; {REMEDY}"),
        (lambda f: (f / STATES).write_text("text"), rf"model_states\.pt: .*; {REMEDY}"),
        (lambda f: torch.save(torch.ones(1), f / STATES), r"holds no checkpoint but a Tensor"),
        (_resave(lambda s: s.update(x=Custom())), r"holds more than tensors and plain values"),
        (_resave(lambda s: s.pop("args")), r"no args\.tokamake or no weights in it"),
        (
            _resave(lambda s: s.update(args=argparse.Namespace())),
            r"no args\.tokamake",
        ),
        (_resave(lambda s: s.update(module=None)), r"no weights in it; make a checkpoint of it"),
        (_shape(hidden_size=0), r"args\.tokamake: hidden_size: 0"),
        (_shape(num_hidden_layers=4), r"layers\.3\..* \(and 5 more\) is missing; fetch"),
        (_shape(num_hidden_layers=2), r"layers\.2\..* \(and 5 more\) is not part of the model"),
        (_shape(tie_word_embeddings=True), r"output_layer\.weight is not part of the model"),
        (
            _shape(intermediate_size=50),
            r"4h_to_h\.weight has shape \[64, 48\], .* \[64, 50\]",
        ),
        (_shape(vocab_size=400), r"word_embeddings\.weight has shape \[256, 64\], .* \[512, 64\]"),
        (_encoder(lambda e: e.pop(NORM)), r"final_layernorm\.weight is missing; fetch or export"),
        (
            _encoder(lambda e: e.update({NORM: e[NORM].double()})),
            r"model\.norm\.weight is torch\.float64; save all tensors in one of",
        ),
    ],
)
def test_broken_folders_are_refused(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "a"
    megatron_deepspeed.write(folder, GQA, random(GQA, 1))
    change(folder)
    with pytest.raises(UserError, match=message) as error:
        megatron_deepspeed.read(folder)
    assert str(error.value).startswith(str(folder))
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"latest: no such file"):
        megatron_deepspeed.read(tmp_path / "nothing")
