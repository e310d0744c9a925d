"""Ranks that share a model compute what one process computes, and read only their parts of it."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import dense, hf_folder
from tests.support.families import FAMILIES, weights
from tests.support.paths import ROOT
from tests.support.programs import torch_python, torchrun
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.errors import UserError
from tokamake.evaluate.evaluate import evaluate
from tokamake.evaluate.perplexity import total_loss
from tokamake.generate.generate import Ends, generate
from tokamake.inference.beams import TokenRules, search
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.engine import Generation, InferenceEngine
from tokamake.inference.layout import WHOLE_MODEL, InferenceLayout, Peers
from tokamake.inference.model import InferenceModel
from tokamake.inference.sampling_settings import BeamSettings, Sampling
from tokamake.runtime.ranks import Ranks

MODELS = ("llama-gqa", "llama-tied", "gpt2", "llama-mqa")
"""Divided heads, an unevenly divided vocabulary, a tied output layer, learned positions."""
QUICK = ("gpt2-hf", "llama-gqa-megatron")
FORMATS: dict[str, dict[str, int]] = {
    "native": {},
    "megatron": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "mds": {"tensor_parallel_size": 2},
    "mds_pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "universal": {},
    "torch_dist": {},
}
"""Formats that one of the models has, too, and their parallel sizes."""
OTHERS = (
    *(f"llama-gqa-{name}" for name in ("hf", *FORMATS) if name != "megatron"),
    *("llama-tied-hf", "llama-mqa-hf"),
)
MORE_RANKS = ("llama-gqa-native", "llama-tied-hf", "llama-mqa-hf")
"""On more ranks, the layouts and the models differ; how a format is read does not."""
LENGTH = 16
TOKENS = np.random.default_rng(0).integers(0, 100, 5 * 2 * LENGTH + 7)
VOCAB_SIZE, END = 120, 3
"""Of the tokenizer; the models have padding entries beyond."""
ROWS = ([5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15], [16], [17, 18, 19])
LAYOUTS = {
    2: [
        InferenceLayout(),
        InferenceLayout(fsdp=True),
        InferenceLayout(tensor_parallel_size=2),
        InferenceLayout(pipeline_parallel_size=2),
    ],
    4: [
        InferenceLayout(tensor_parallel_size=2, pipeline_parallel_size=2),
        InferenceLayout(tensor_parallel_size=2, fsdp=True),
        InferenceLayout(pipeline_parallel_size=2, fsdp=True),
        InferenceLayout(pipeline_parallel_size=4),
    ],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each model, in several formats; weights make confident predictions."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        shape = FAMILIES[name]
        wide = {key: 8 * tensor.float() for key, tensor in weights(shape).items()}
        hf_folder.write(root / f"{name}-hf", shape, wide)
    for format, sizes in FORMATS.items():
        target, named = root / f"llama-gqa-{format}", format.replace("_", "-")
        convert(source=root / "llama-gqa-hf", target=target, format=named, **sizes)
    return root


def compute(
    folder: Path, layout: InferenceLayout, ranks: Ranks
) -> tuple[float, list[Any], list[float]]:
    """Loss of a stream of tokens; then, on the first rank, continuations and scores of prompts."""
    model = InferenceModel(open_any(folder), layout, peers=Peers(ranks, torch.device("cpu")))
    loss = total_loss(model, TOKENS, sequence_length=LENGTH, batch_size=2)
    driven = DrivenModel(model, ranks.world_size)
    with driven.driven() as drives:
        if not drives:
            return loss, [], []
        engine = InferenceEngine(driven, num_rows=3, vocab_size=VOCAB_SIZE)
        started = [
            Generation(row, Sampling(temperature, 40, seed=1), 6, frozenset([END]))
            for row in ROWS
            for temperature in (0.0, 1.0)
        ]
        engine.run(started)
        beams = search(
            driven,
            ROWS[0],
            beams=BeamSettings(3),
            max_new_tokens=4,
            rules=TokenRules(frozenset([END])),
            vocab_size=VOCAB_SIZE,
        )
        texts = [*(each.tokens for each in started), *(beam.tokens for beam in beams)]
        kept = [range(1, len(row) - 1) for row in ROWS]
        scores = driven.score(ROWS, kept)
        return loss, [*texts, scores.are_greedy.tolist()], scores.log_probabilities.tolist()


def compute_all(folders: list[Path], layouts: list[InferenceLayout]) -> list[Any]:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    return [compute(folder, layout, ranks) for folder in folders for layout in layouts]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        pytest.param(2, QUICK, id="2-quick"),
        pytest.param(2, OTHERS, id="2-others", marks=pytest.mark.grid),
        pytest.param(4, QUICK + MORE_RANKS, id="4", marks=pytest.mark.grid),
    ],
)
def test_every_layout_equals_one_process(
    models: Path, world_size: int, names: tuple[str, ...]
) -> None:
    folders, layouts = [models / name for name in names], LAYOUTS[world_size]
    alone = [compute(folder, WHOLE_MODEL, Ranks(0, 1, 0, 1)) for folder in folders]
    texts = [continued for _, continued, _ in alone]
    # The formats hold the same model.
    assert len({str(text) for text in texts}) == len({name.rpartition("-")[0] for name in names})
    of_ranks = spawn(compute_all, world_size, folders, layouts)
    losses = [[loss for loss, *_ in results] for results in of_ranks]
    assert all(each == losses[0] for each in losses), "ranks disagree"
    cases = [(folder, layout) for folder in folders for layout in layouts]
    for (folder, layout), (loss, continued, scores) in zip(cases, of_ranks[0], strict=True):
        expected, expected_texts, expected_scores = alone[folders.index(folder)]
        # Tensor parallelism changes the order of sums; products are not joined with FSDP.
        rel = 1e-5 if layout.tensor_parallel_size > 1 else 1e-7 if layout.fsdp else 1e-8
        assert loss == pytest.approx(expected, rel=rel), (folder.name, layout)
        assert continued == expected_texts, (folder.name, layout)
        assert scores == pytest.approx(expected_scores, rel=1e-4), (folder.name, layout)


@pytest.mark.grid
@pytest.mark.ranks
def test_every_layout_equals_one_process_in_bf16(models: Path) -> None:
    folder = models / "llama-gqa-hf"
    layouts = [replace(layout, dtype="bf16") for layout in LAYOUTS[2]]
    loss, texts, scores = compute(folder, replace(WHOLE_MODEL, dtype="bf16"), Ranks(0, 1, 0, 1))
    of_rank_0, _ = spawn(compute_all, 2, [folder], layouts)
    for layout, result in zip(layouts, of_rank_0, strict=True):
        if layout.tensor_parallel_size == 1:
            assert result == (loss, texts, scores), layout
        else:  # partial sums are rounded to bf16, too
            assert result[0] == pytest.approx(loss, rel=5e-3), layout
            assert result[2] == pytest.approx(scores, rel=5e-2), layout


def held(folder: Path, layout: InferenceLayout) -> dict[str, int]:
    """Elements of each parameter that this rank holds."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), 0, 1)
    model = InferenceModel(open_any(folder), layout, peers=Peers(ranks, torch.device("cpu")))
    local = {n: getattr(p, "_local_tensor", p) for n, p in model._module.named_parameters()}
    return {name: tensor.numel() for name, tensor in local.items()}


@pytest.mark.ranks
def test_ranks_hold_only_their_parts(models: Path) -> None:
    folder = models / "llama-gqa-hf"
    shape = FAMILIES["llama-gqa"]
    whole = sum(tensor.numel() for tensor in weights(shape).values())
    for layout in LAYOUTS[2][1:]:
        sizes = [sum(of_rank.values()) for of_rank in spawn(held, 2, folder, layout)]
        assert max(sizes) < 0.6 * whole, layout


def test_layers_that_predict_further_tokens_are_left_out_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = dense.spread("glm4_moe")
    hf_folder.write(tmp_path / "hf", shape, random_tensors(shape, 1))
    peers = Peers(Ranks(0, 1, 0, 1), torch.device("cpu"))
    model = InferenceModel(open_any(tmp_path / "hf"), WHOLE_MODEL, peers=peers)
    assert {*model._module.layers} == {"0", "1", "2", "3"}
    line = f"{tmp_path / 'hf'}: 1 MTP layer ignored: for training alone\n"
    assert capsys.readouterr().out == line


def damaged(folder: Path) -> str:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), 0, 1)
    with pytest.raises(UserError) as caught:
        InferenceModel(open_any(folder), InferenceLayout(), peers=Peers(ranks, torch.device("cpu")))
    return str(caught.value)


@pytest.mark.ranks
def test_damage_is_found_on_whichever_rank_reads_the_file(models: Path, tmp_path: Path) -> None:
    """Ranks share the files of a checkpoint; all of them raise the error of one."""
    for number, file in enumerate(sorted((models / "llama-gqa-megatron").rglob("*.pt"))[:2]):
        folder = shutil.copytree(models / "llama-gqa-megatron", tmp_path / str(number))
        path = folder / file.relative_to(models / "llama-gqa-megatron")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        messages = spawn(damaged, 2, folder)
        assert messages[0] == messages[1]
        assert f"{path}: damaged" in messages[0]


def test_weights_and_states_have_the_dtype(tmp_path: Path) -> None:
    folder, ranks = tmp_path / "model", Ranks(0, 1, 0, 1)
    shape = FAMILIES["llama-gqa"]
    hf_folder.write(folder, shape, weights(shape))
    exact, *_ = compute(folder, WHOLE_MODEL, ranks)
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        layout = InferenceLayout(dtype=dtype)  # type: ignore[arg-type]
        model = InferenceModel(open_any(folder), layout, peers=Peers(ranks, torch.device("cpu")))
        assert {p.dtype for p in model._module.parameters()} == {torch_dtype}
        loss, *_ = compute(folder, layout, ranks)
        assert loss != exact
        assert loss == pytest.approx(exact, rel=0.02)


def test_a_layout_in_words() -> None:
    layout = InferenceLayout(4, 2, fsdp=True, dtype="bf16")
    assert layout.describe(16) == "16 ranks = data 2 × tensor 4 × pipeline 2, sharded, bf16"
    assert InferenceLayout().describe(2) == "2 ranks = data 2, fp32"


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        ((2, 1), 1, "tensor 2 × pipeline 1 needs 2 ranks or a multiple, and there is 1; start as"),
        ((2, 2), 6, "tensor 2 × pipeline 2 needs 4 ranks or a multiple, and there are 6; start"),
        ((3, 1), 3, "tensor_parallel_size: 3: does not divide 8"),
        (
            (1, 5),
            5,
            "pipeline_parallel_size: 5: 4 layers for 5 pipeline stages leave a stage empty",
        ),
        ((0, 1), 1, "tensor_parallel_size: 0: too small; give 1 or more"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    sizes: tuple[int, int], world_size: int, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        InferenceLayout(*sizes).check(FAMILIES["llama"], world_size=world_size)
    assert str(caught.value).startswith(message)


def launch(*arguments: object, ranks: int) -> subprocess.CompletedProcess[str]:
    """Run a command on several ranks, as a user does."""
    command = [*torchrun(ranks), torch_python(), "-m", "tokamake", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.grid
@pytest.mark.slow
def test_torchrun_starts_evaluate_and_generate(models: Path, sampled: Path, tmp_path: Path) -> None:
    shape = FAMILIES["llama-gqa"].model_copy(update={"vocab_size": 400})
    hf_folder.write(tmp_path / "model", shape, weights(shape))
    tokenizer = sampled / "tokenizer"
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "Return a list of words. " * 20}) + "\n")
    common = ("--checkpoint", tmp_path / "model", "--tokenizer", tokenizer)
    scored = ("evaluate", *common, "--data", text, "--sequence-length", 16)
    written = ("generate", *common, "--prompt", "def ", "--max-new-tokens", 8)
    alone = {"scores": tmp_path / "scores-1.json", "samples": tmp_path / "samples-1.json"}
    given = {"checkpoint": tmp_path / "model", "tokenizer": tokenizer}
    evaluate(data=(str(text),), sequence_length=16, output=alone["scores"], **given)
    generate(prompts=("def ",), ends=Ends(8), output=alone["samples"], **given)
    for name, command, line in (
        ("scores", scored, "sequence length"),
        ("samples", written, "def "),
    ):
        shared = tmp_path / f"{name}-2.json"
        result = launch(*command, "--pipeline-parallel-size", 2, "--output", shared, ranks=2)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count(line) == result.stdout.count("2 ranks = pipeline 2, fp32\n") == 1
        assert json.loads(shared.read_text()) == json.loads(alone[name].read_text())


@pytest.mark.slow
@pytest.mark.grid
def test_a_layout_that_the_ranks_cannot_share_is_one_line(models: Path, sampled: Path) -> None:
    model = ("--checkpoint", models / "llama-gqa-hf", "--tokenizer", sampled / "tokenizer")
    prompt = ("--prompt", "def ", "--tensor-parallel-size", 3)
    refused = launch("generate", *model, *prompt, ranks=2)
    assert refused.returncode
    assert refused.stderr.count("tensor 3 × pipeline 1 needs 3 ranks or a multiple") == 1
    assert "Traceback" not in refused.stderr.partition("torch/distributed")[0]
