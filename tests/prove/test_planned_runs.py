"""Runs of a config before its data exist, also runs that finetune, and mistakes in naming them."""

import re
from pathlib import Path

import pytest
import yaml

from tokamake.config.architecture_files import read_architecture
from tokamake.config.finetune import FinetuneSettings, FinetuneTask
from tokamake.config.resolved_run import write_run
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.finetune.finetune_run import FinetuneRun, write_finetune_run
from tokamake.preflight.finetune import finetuned_architecture
from tokamake.prove.miniature import miniature
from tokamake.prove.planned_runs import read_any

MODEL = Path("config/models/tiny-gpt.yaml")
CONFIG = f"""\
run: planned
model: {{architecture: {MODEL}}}
train:
  parallel: {{pipeline_parallel_size: 2}}
"""
ELSEWHERE = """\
run: planned
model: {checkpoint: elsewhere}
train: {finetune: true}
"""

FINETUNED = """\
run: planned
model: {checkpoint: elsewhere}
finetune: {task: rte, train_files: none.tsv, validation_files: none.tsv}
train: {sequence_length: 32, parallel: {tensor_parallel_size: 2}}
"""
BERT = Path("config/models/bert-base.yaml")


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_the_model_of_a_checkpoint_on_another_machine_is_given(tmp_path: Path) -> None:
    (run,) = read_any(write(tmp_path, ELSEWHERE), None, architecture=MODEL)
    assert run.architecture == read_any(write(tmp_path, CONFIG), None)[0].architecture
    assert run.train.finetune


def test_a_run_that_finetunes_has_the_head_of_its_task(tmp_path: Path) -> None:
    """Neither its files nor its checkpoint exist."""
    (run,) = read_any(write(tmp_path, FINETUNED), None, architecture=BERT)
    assert run.train.objective == "classification"
    assert run.train.parallel.tensor_parallel_size == 2
    assert run.architecture.setting("num_classes") == 2
    tiny = miniature(run, 4, precision="fp32")
    assert tiny.architecture.hidden_size < run.architecture.hidden_size
    assert tiny.architecture.setting("num_classes") == 2


def test_the_run_yaml_of_a_finetuning_is_read(tmp_path: Path) -> None:
    settings = yaml.safe_load(FINETUNED)
    run = FinetuneRun(
        run="prepared",
        seed=1,
        checkpoint=tmp_path,
        pretrained=tmp_path,
        new_tensors=(),
        dropped_tensors=(),
        tokenizer=tmp_path,
        output=tmp_path,
        architecture=finetuned_architecture(read_architecture(BERT), FinetuneTask(name="rte")),
        train=TrainSettings.model_validate(settings["train"]),
        finetune=FinetuneSettings.model_validate(settings["finetune"]),
    )
    write_finetune_run(tmp_path / "run.yaml", run)
    (found,) = read_any(tmp_path / "run.yaml", None)
    (other,) = read_any(tmp_path / "run.yaml", None, architecture=BERT)
    assert found.architecture == other.architecture == run.architecture
    assert found.train.parallel == run.train.parallel


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (CONFIG, "other", "--run other: not in .*; choose one of planned"),
        (CONFIG, "", "--run '': not in .*; choose one of planned"),
        (CONFIG.replace("tiny-gpt", "none"), None, r"config/models/none\.yaml"),
        (ELSEWHERE, None, "checkpoint: elsewhere: no such folder; .*--architecture config/"),
        (
            re.sub("train.*", "", ELSEWHERE),
            None,
            "checkpoint: elsewhere: no such folder; .* set train.finetune",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, name: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_any(write(tmp_path, text), name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            "{finetune: true, parallel: {tensor_parallel_size: 3}}",
            "tensor_parallel_size: 3: does not divide 4 .att",
        ),
        (
            "{finetune: true, parallel: {pipeline_parallel_size: 33}}",
            "pipeline_parallel_size: 33: ",
        ),
        (
            "{finetune: true, sequence_length: 100000}",
            "100000: more than the .* max_position_embeddings of .*tiny",
        ),
        (
            "{finetune: true, global_batch_size: 2, parallel: {pipeline_parallel_size: 4}}",
            "config.yaml: train.*pipeline_parallel_size: 4: steps of 2 micro batches leave ranks",
        ),
    ],
)
def test_a_layout_that_the_model_itself_cannot_have_is_refused(
    tmp_path: Path, train: str, message: str
) -> None:
    path = write(tmp_path, f"run: planned\nmodel: {{checkpoint: elsewhere}}\ntrain: {train}\n")
    with pytest.raises(UserError, match=message):
        read_any(path, None, architecture=MODEL)


def test_a_run_yaml_has_one_run(tmp_path: Path) -> None:
    (run,) = read_any(write(tmp_path, CONFIG), None)
    write_run(tmp_path / "run.yaml", run)
    assert read_any(tmp_path / "run.yaml", "planned")
    with pytest.raises(UserError, match=r"--run other: .*run\.yaml is of planned; leave --run out"):
        read_any(tmp_path / "run.yaml", "other")


def test_settings_of_the_command_line_replace_those_of_a_config(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG)
    (run,) = read_any(path, None, settings=["train.parallel.tensor_parallel_size=2"])
    assert run.train.parallel.tensor_parallel_size == 2
    assert run.train.parallel.pipeline_parallel_size == 2
    with pytest.raises(UserError, match=r"^command line: train.parallel.tensor_parallel_size: .*0"):
        read_any(path, None, settings=["train.parallel.tensor_parallel_size=0"])
    write_run(tmp_path / "run.yaml", run)
    with pytest.raises(UserError, match=r"^train.backend: .*run\.yaml is the result of a config"):
        read_any(tmp_path / "run.yaml", None, settings=["train.backend=native"])


def test_a_row_is_proved_while_the_checkpoint_of_another_one_is_missing(tmp_path: Path) -> None:
    table = tmp_path / "runs.tsv"
    table.write_text(
        "run\tmodel.checkpoint\tmodel.checkpoint.run\ttrain.finetune\n"
        "first\t\t\t\nsecond\t\tfirst\ttrue\nlost\telsewhere\t\ttrue\n"
    )
    path = write(tmp_path, CONFIG.replace("run: planned", f"runs: {table}"))
    (run,) = read_any(path, "second")
    assert run.run == "second"
    with pytest.raises(UserError, match=r"runs.tsv:4: model.checkpoint: elsewhere: no such folder"):
        read_any(path, None)


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{tmp_path}: a folder; name the file in it"):
        read_any(tmp_path, None)
