"""A biencoder that starts from a BERT: weights of the towers, what is refused, what is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support import berts, hf_folder
from tests.support.biencoders import ENCODER, biencoder
from tests.support.engines import build, parts, whole
from tests.support.layouts import laid_out
from tests.support.objective_training import template
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight.initial_checkpoint import (
    check_start,
    describe_initial_checkpoint,
    initial_architecture,
)
from tokamake.preflight.other_family import start_note

BERT = berts.bert(vocab_size=120, max_position_embeddings=32)
TOWERS = {"vocab_size": 120, "max_position_embeddings": 32}
SHAPES = {
    "separate": biencoder(**TOWERS, projection_dim=12),
    "shared": biencoder(**TOWERS, shared_towers=True),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that starts from a BERT, which Megatron-LM wrote and `convert` converts."""
    root = tmp_path_factory.mktemp("towers")
    hf_folder.write(root / "hf", BERT, random_tensors(BERT, 5))
    convert(source=root / "hf", target=root / "megatron", format="megatron")
    convert(source=root / "megatron", target=root / "native", format="native")
    changed = laid_out(template(root), {"objective": "ict"})
    return changed.model_copy(update={"checkpoint": root / "native"})


def run_with(run: Run, shape: Architecture) -> Run:
    return run.model_copy(update={"architecture": shape})


def first_weights(runs: list[Run]) -> list[Any]:
    """Chunks of the weights of each run before its first step."""
    return [
        [part for chunk in build(run)._chunks for part in parts(chunk, chunk.local)] for run in runs
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_both_towers_get_the_weights_of_the_bert(backend: str, run: Run) -> None:
    changed = laid_out(run, {"backend": backend, "zero_stage": 2})
    runs = [run_with(changed, shape) for shape in SHAPES.values()]
    function = first_weights if backend == "native" else first_deepspeed_weights
    bert = random_tensors(BERT, 5)
    for shape, *of_ranks in zip(SHAPES.values(), *spawn(function, 2, runs), strict=True):
        weights, projections = whole(of_ranks), []
        for name, tensor in weights.items():
            _, tower, rest = name.split(".", 2)
            if rest == "projection.weight":
                projections.append(tensor)
            elif rest == "projection.bias":
                assert not tensor.any()
            else:
                assert torch.equal(tensor, bert[f"model.{rest}"]), (tower, rest)
        assert len(projections) == 2 * bool(shape.setting("projection_dim"))
        assert all(torch.equal(each, projections[0]) and each.std() > 0 for each in projections)


def first_deepspeed_weights(runs: list[Run]) -> list[Any]:
    engines = [build(run) for run in runs]
    return [
        [part for each in engine._fragments for part in parts(each, each.flat)]
        for engine in engines
    ]


def stated(folder: Path, shape: Architecture, **changes: Any) -> Path:
    """File of an architecture."""
    values = {key: value for key, value in shape.model_dump().items() if value is not None}
    (folder / "shape.yaml").write_text(yaml.safe_dump(values | changes))
    return folder / "shape.yaml"


def test_the_tokenizer_or_the_bert_decides_the_vocabulary(tmp_path: Path) -> None:
    path = stated(tmp_path, SHAPES["separate"], vocab_size=None, initializer_range=0.01)
    found = initial_architecture(BERT, path, source="start")
    changes = {"initializer_range": 0.01}
    assert found == SHAPES["separate"].model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 128}, "hidden_size: checkpoint 64, config 128"),
        ({"vocab_size": 131}, "vocab_size: checkpoint 120, config 131"),
        ({"num_hidden_layers": 2, "type_vocab_size": 0}, "type_vocab_size: checkpoint 2, config 0"),
        ({"max_position_embeddings": 64}, "max_position_embeddings: checkpoint 32, config 64"),
    ],
)
def test_a_bert_of_other_sizes_is_one_error(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = stated(tmp_path, SHAPES["separate"], **changes)
    with pytest.raises(UserError, match=text) as error:
        initial_architecture(BERT, path, source="start")
    assert str(error.value).startswith(f"start: a bert of other sizes than the towers in {path} (")
    assert "\n" not in str(error.value)


def test_other_families_start_no_towers(tmp_path: Path) -> None:
    t5 = {name: value for name, value in ENCODER.items() if name != "type_vocab_size"}
    other = Architecture(**{**t5, "family": "t5"})
    path = stated(tmp_path, SHAPES["separate"])
    with pytest.raises(UserError) as error:
        initial_architecture(other, path, source="start")
    assert str(error.value) == (
        f"start: does not match model.architecture: the model is of family t5, and {path} of family"
        " biencoder; name the matching file, or a bert for its towers"
    )


def test_towers_do_not_continue_a_training(run: Run) -> None:
    assert run.checkpoint is not None
    start = open_any(run.checkpoint)
    settings = TrainSettings.model_validate({"objective": "ict", "finetune": False, **LENGTHS})
    with pytest.raises(UserError, match="gives a biencoder its weights alone"):
        check_start(start, settings, architecture=SHAPES["shared"])


LENGTHS = {"train_steps": 6, "sequence_length": 16, "global_batch_size": 8, "micro_batch_size": 2}


def test_a_resolved_run_is_of_other_sizes_than_its_checkpoint(run: Run) -> None:
    describe_initial_checkpoint(run_with(run, SHAPES["shared"]))
    with pytest.raises(UserError, match="hidden_size: checkpoint 64, config 32"):
        describe_initial_checkpoint(run_with(run, biencoder(**TOWERS, hidden_size=32)))


def test_a_line_names_dropped_and_new_tensors() -> None:
    assert start_note(BERT, SHAPES["separate"], source="start") == (
        "start: its bert starts each tower, without masked_token_head, pooler, "
        "sentence_order_head, with a new projection"
    )
    plain = start_note(BERT, SHAPES["shared"], source="start")
    assert plain.endswith("without masked_token_head, pooler, sentence_order_head")
