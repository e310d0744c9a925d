"""A model computes the same logits as in transformers after every conversion."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoint.test_convert_grid import SHAPES, values
from tests.support import hf_folder
from tests.support.engines import build
from tests.support.families import FAMILIES, weights
from tests.support.grids import cover
from tests.support.layouts import laid_out, parallel
from tests.support.proofs import STARTS
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.runs import make_run, prepare
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.config.resolved_run import read_run
from tokamake.train.objectives import _base as objectives

FORMS = {
    "mds": {"tensor_parallel_size": 2},
    "mds-pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "universal": {"pipeline_parallel_size": 2},
    "megatron": {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2,
    },
    "torch-dist": {},
    "native": {},
}  # fmt: skip


KINDS = (
    "starcoder2",
    "starcoder2-mqa-plain",
    "bloom-6-heads",
    "llama-biased",
    "llama-wide-heads",
    "gpt2-relu",
    "qwen3",
    "qwen2",
    "smollm3",
    "phi3",
)
MODELS = FAMILIES | {
    name: shape for name, shape in SHAPES.items() if name.rsplit("-", 2)[0] in KINDS
}
"""All kinds of attention, positions and biases that the trainer has."""
PAIRS = [(family, format) for family in MODELS for format in FORMS]
KEPT = cover(PAIRS, lambda pair: {*values(pair[0], MODELS), pair[1]})
"""Models and formats of the quick test; test_convert_grid.py compares the tensors of the others."""
CASES = [
    pytest.param(family, formats, id=f"{family}-{name}", marks=marks)
    for family in MODELS
    for name, is_kept, marks in (("each kind", True, ()), ("all others", False, pytest.mark.grid))
    if (formats := [pair[1] for pair in PAIRS if pair[0] == family and (pair in KEPT) == is_kept])
]
SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
SAMPLES = torch.arange(48).view(2, 24)


def of_transformers(folder: Path, tokens: Tensor = SAMPLES) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens).logits


def of_the_trainer(folder: Path) -> Tensor:
    """Logits of the model that training would start from, read tensor by tensor."""
    opened = open_any(folder)
    read = {key.removeprefix("model."): opened.source.read(key) for key in opened.source}
    with torch.no_grad():
        return model_tensors.to_model(opened.architecture, read).eval()(SAMPLES)


@pytest.mark.parametrize(("family", "formats"), CASES)
def test_logits_equal_those_of_transformers_after_every_conversion(
    family: str, formats: list[str], tmp_path: Path
) -> None:
    architecture = MODELS[family]
    small = {name: 0.1 * each for name, each in weights(architecture, torch.float32).items()}
    hf_folder.write(tmp_path / "start", architecture, small)
    expected = of_transformers(tmp_path / "start")
    assert expected.std() > 0.01
    for format in formats:
        sizes = FORMS[format]
        there, back = tmp_path / format, tmp_path / f"{format}-hf"
        convert(source=tmp_path / "start", target=there, format=format, **sizes)  # type: ignore
        torch.testing.assert_close(of_the_trainer(there), expected, rtol=0, atol=1e-5)
        convert(source=there, target=back, format="hf")
        assert torch.equal(of_transformers(back), expected)


ON_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("mds-pipeline", parallel(tp=2, pp=2)),
    "tied": ("megatron", parallel(tp=2, pp=2)),
    "gpt": ("mds-pipeline", parallel(tp=2, pp=2, sp=True)),
    "mqa": ("mds", parallel(tp=4)),
    "deep": ("megatron", parallel(pp=4)),
}
"""Models, formats, and layouts of four ranks of the trainer."""
TOKENS = torch.arange(8 * 17).view(8, 17) % 121


def of_ranks(configs: dict[str, Path]) -> dict[str, Tensor | None]:
    """This rank's part of the logits of each model, if it has the last stage."""
    tensors: dict[str, Tensor | None] = {}
    for name, config in configs.items():
        engine, seen = build(laid_out(read_run(config), ON_RANKS[name][1])), list[Tensor]()
        loss = objectives.cross_entropy

        def watched(logits: Tensor, *rest: Any, seen: Any = seen, loss: Any = loss, **size: Any):
            seen.append(logits)
            return loss(logits, *rest, **size)

        objectives.cross_entropy = watched
        engine.validate(iter(TOKENS.numpy().reshape(4, 2, 17)))
        objectives.cross_entropy = loss
        tensors[name] = torch.cat(seen) if seen else None
        dist.barrier()
    return tensors


@pytest.mark.grid
@pytest.mark.ranks
def test_ranks_that_share_a_converted_model_compute_the_same(tmp_path: Path) -> None:
    """Of tensor parallelism in pipelines, and each alone; fp32."""
    prepare(tmp_path)
    configs, expected = {}, {}
    for name, (format, changes) in ON_RANKS.items():
        root, sizes = tmp_path / name, changes["parallel"]
        weights = random_tensors(STARTS[name], 6)
        hf_folder.write(root / "hf", STARTS[name], weights)
        expected[name] = of_transformers(root / "hf", TOKENS[:, :-1])
        parts = {key: size for key, size in sizes.items() if key in SIZES}
        convert(source=root / "hf", target=root / "parts", format=format, **parts)  # type: ignore
        convert(source=root / "parts", target=root / "native", format="native")
        configs[name] = make_run(tmp_path, name, start=root / "native", finetune=True)
    founds = spawn(of_ranks, 4, configs)
    for name, theirs in expected.items():
        assert theirs.std() > 0.01
        # Those of a tensor follow one another; parts of the vocabulary may be filled up.
        parts = [each[name] for each in founds if each[name] is not None]
        ours = torch.cat(parts[: ON_RANKS[name][1]["parallel"].get("tensor_parallel_size", 1)], -1)
        torch.testing.assert_close(ours[..., :121], theirs, rtol=0, atol=1e-5)
