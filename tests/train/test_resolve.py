"""`resolve` writes what `train` reads, and refuses what does not fit together."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.runs import ARCHITECTURE, SETTINGS, make_index, make_run, prepare, vouch
from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import read_run
from tokamake.data.indexed.paths import manifest_path
from tokamake.errors import UserError
from tokamake.preflight.initial_checkpoint import describe_initial_checkpoint
from tokamake.preflight.run_record import write_record
from tokamake.train.resolve import check_parent_tokenizer


def test_a_resolved_run_is_complete(root: Path) -> None:
    run = read_run(make_run(root, "complete"))
    assert run.architecture == ARCHITECTURE
    assert (run.run, run.seed, run.output) == ("complete", 11, root / "complete" / "training")
    assert run.train.model_dump(include=SETTINGS.keys(), exclude={"optimizer", "schedule"}) == {
        key: value for key, value in SETTINGS.items() if key not in ("optimizer", "schedule")
    }
    assert run.train.optimizer.beta2 == 0.95


def test_equal_inputs_give_equal_bytes(root: Path) -> None:
    first = make_run(root, "same").read_bytes()
    assert make_run(root, "same").read_bytes() == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 33}, r"sequence_length: 33: more than the 32 max_position_embeddings"),
        ({"sequence_length": 32}, r"index: has sequence_length 16, train.sequence_length is 32"),
        ({"split": "90,10,0"}, r"index: has split 80,20,0, train.split is 90,10,0"),
        (
            {"train_steps": 11},
            r"has 80 training samples, train.train_steps take 88; run",
        ),
        (
            {"precision": "bf16", "zero_stage": 0, "backend": "deepspeed"},
            r"zero_stage: 0: DeepSpeed keeps no fp32 master weights",
        ),
        ({"colour": "red"}, r"train: colour: unknown key"),
        ({"optimizer": {"name": "magic"}}, r"train: optimizer.name: 'magic': unknown name"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    root: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_run(root, "misfit", **changes)
    assert not (root / "misfit" / "run.yaml").exists()


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    vouch(tmp_path / "corpus", vocab_size=121)
    with pytest.raises(UserError, match="vocabulary of 121, the model has 120 embeddings"):
        make_run(tmp_path, "misfit")


@pytest.mark.parametrize("is_noted", [True, False], ids=["noted", "index of an earlier version"])
@pytest.mark.parametrize("parallel", [{}, {"tensor_parallel_size": 2}], ids=["plain", "tensor"])
def test_a_token_without_an_embedding_is_refused(
    tmp_path: Path, parallel: dict[str, int], is_noted: bool
) -> None:
    prepare(tmp_path)
    manifest_path(tmp_path / "corpus").unlink()
    tokens = np.fromfile(tmp_path / "corpus.bin", np.uint16)
    tokens[-3] = 120
    tokens.tofile(tmp_path / "corpus.bin")
    shutil.rmtree(tmp_path / "index")
    samples = {"train_samples": 80, "valid_samples": 16}
    make_index(tmp_path, sequence_length=16, split="80,20,0", seed=3, **samples)
    if not is_noted:
        path = tmp_path / "index/index.json"
        description = json.loads(path.read_text())
        del description["largest_tokens"], description["digest"]
        files.write_json(path, {**description, "digest": files.digest(description)})
    message = r"corpus\.bin: holds token 120, the model has 120 embeddings; tokenize again"
    with pytest.raises(UserError, match=message):
        make_run(tmp_path, "misfit", parallel=parallel)


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "start" / "latest").unlink()
    with pytest.raises(UserError, match=r"start: no checkpoint of a known format .*; give"):
        make_run(tmp_path, "misfit")


# The start from another run


def write_architecture(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**ARCHITECTURE.model_dump(mode="json"), **changes}))
    return path


def test_a_run_may_have_other_positions_than_its_parent(root: Path, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    changes = {"rope_theta": 1e6, "rope_scaling": scaling, "max_position_embeddings": 64}
    path = write_architecture(tmp_path / "long.yaml", **changes)
    run = read_run(make_run(root, "long", architecture=path, parent="base", finetune=True))
    assert run.parent == "base"
    assert run.architecture.model_dump(mode="json") == {
        **ARCHITECTURE.model_dump(mode="json"), **changes,
        "rope_scaling": run.architecture.rope_scaling.model_dump(mode="json"),
    }  # fmt: skip
    assert run.architecture.rope_scaling.factor == 2
    describe_initial_checkpoint(run)
    with pytest.raises(UserError, match="not of the architecture that the run was resolved for"):
        describe_initial_checkpoint(run.model_copy(update={"parent": None}))
    with pytest.raises(UserError, match=r"rope_theta: checkpoint 10000\.0, config 1000000\.0"):
        make_run(root, "misfit", architecture=path, finetune=True)


def test_a_run_has_the_shape_of_its_parent(root: Path, tmp_path: Path) -> None:
    path = write_architecture(tmp_path / "wide.yaml", rope_theta=1e6, intermediate_size=64)
    with pytest.raises(UserError) as caught:
        make_run(root, "misfit", architecture=path, parent="base", finetune=True)
    lines = str(caught.value).splitlines()
    assert lines[1:] == [f"intermediate_size: run base 48, config 64 ({path})"]


def test_a_run_has_the_tokenizer_of_its_parent(tmp_path: Path) -> None:
    prepare(tmp_path)
    vouch(tmp_path / "corpus", vocab_size=120, tokenizer="b" * 64)
    index_json = {"pairs": {"corpus": {}}}
    checkpoint = tmp_path / "base/training/global_step6"
    checkpoint.mkdir(parents=True)
    state = ResumeState("d" * 64, 6, 48, 1.0, 1)
    files.write_json(checkpoint / "state.json", state.to_json())
    check = functools.partial(
        check_parent_tokenizer, checkpoint, "base", index_json=index_json, data_root=tmp_path
    )
    check()  # an earlier version recorded no tokenizer
    record = {"index": {}, "datasets": ["corpus"], "weights": "w", "tokenizers": ["b" * 64]}
    write_record(checkpoint.parent, state.digest, content=record)
    check()
    write_record(checkpoint.parent, state.digest, content={**record, "tokenizers": ["a" * 64]})
    message = (
        r"run base was trained with another tokenizer \(aaaaaaaaaaaa\) than .* \(bbbbbbbbbbbb\)"
    )
    with pytest.raises(UserError, match=message):
        check()
