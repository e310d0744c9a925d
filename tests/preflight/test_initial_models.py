"""What runs start from: another run of the table, checked before its checkpoint exists."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.workflow_configs import make_tokenizer, read_config, train, wildcards
from tests.support.workflows import ARCHITECTURE
from tokamake.checkpoint import writer
from tokamake.checkpoint.random_source import RandomSource
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.workflow.checkpoints import CheckpointRules
from tokamake.workflow.segments import SegmentRules

pytestmark = pytest.mark.usefixtures("workspace_here")

CHILD = "run model.checkpoint.run train.finetune"
LONG = {
    "max_position_embeddings": 256, "rope_theta": 500_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4},
}  # fmt: skip


def write_architecture(path: str, **changes: Any) -> str:
    Path(path).write_text(yaml.safe_dump({**ARCHITECTURE, **changes}))
    return path


def write_table(*lines: str) -> str:
    """Write a table of runs with one cell per word; `-` and what a line lacks are empty."""
    rows = [["" if word == "-" else word for word in line.split()] for line in lines]
    width = len(rows[0])
    text = "".join("\t".join([*row, *[""] * (width - len(row))]) + "\n" for row in rows)
    Path("runs.tsv").write_text(text)
    return "runs.tsv"


def refused(*lines: str, **sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_config(runs=write_table(*lines), **sections)
    return str(caught.value)


def test_a_run_waits_for_the_run_that_it_starts_from() -> None:
    # The order of the rows does not matter.
    config = read_config(runs=write_table(CHILD, "anneal long true", "base", "long base true"))
    rules = CheckpointRules(config)
    assert rules.starts == {}
    for run, parent in (("long", "base"), ("anneal", "long")):
        job = wildcards(run=run)
        assert rules.start_inputs(job) == f"results/{parent}/train.json"
        assert rules.start_options(job) == [f"--checkpoint=results/{parent}/training"]


def test_a_mapping_in_a_cell_names_a_run(workspace_here: Path) -> None:
    cells = ("run\tmodel.checkpoint\ttrain.finetune", "base\t\t", "long\t{run: base}\ttrue")
    (workspace_here / "runs.tsv").write_text("\n".join(cells) + "\n")
    config = read_config(runs="runs.tsv")
    assert [run.model.parent for run in config.runs.values()] == [None, "base"]


def test_positions_may_change_at_the_start_and_allow_longer_sequences() -> None:
    columns = f"{CHILD} model.architecture train.sequence_length"
    write_architecture("long.yaml", **LONG)
    config = read_config(
        runs=write_table(columns, "base", "long base true long.yaml 256", "last long true - 256")
    )
    assert config.runs["long"].model.stated == Path("long.yaml")
    # The architecture of the config is not that of a run that has a parent.
    assert config.runs["last"].model.stated is None


def test_the_positions_of_a_parent_limit_the_sequence_length() -> None:
    lines = (f"{CHILD} train.sequence_length", "base", "long base true 65")
    assert refused(*lines, model={"architecture": "architecture.yaml"}) == (
        "runs.tsv:3: train.sequence_length: 65: more than the 64 max_position_embeddings of "
        "run base; lower it"
    )


def test_other_fields_must_be_those_of_the_parent() -> None:
    write_architecture("wide.yaml", **LONG, hidden_size=64, vocab_size=700)
    message = refused(f"{CHILD} model.architecture", "base", "wide base true wide.yaml")
    assert message == (
        "runs.tsv:3: model.checkpoint: the last checkpoint of run base: does not match "
        "model.architecture; name the matching file, or from_checkpoint\n"
        "hidden_size: run base 32, config 64 (wide.yaml)"
    )


def test_learned_positions_are_weights_and_stay() -> None:
    learned = {"family": "gpt", "num_key_value_heads": 4, "position_embedding": "learned"}
    write_architecture("architecture.yaml", **learned)
    write_architecture("long.yaml", **learned, max_position_embeddings=256)
    message = refused(f"{CHILD} model.architecture", "base", "long base true long.yaml")
    assert message.endswith("max_position_embeddings: run base 64, config 256 (long.yaml)")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ("base", "long bas true"),
            "runs.tsv:3: model.checkpoint: no run of this config is called bas; did you mean base? "
            "If it is a run of another config, give its folder, results/bas/training",
        ),
        (
            ("base", "long other true"),
            "runs.tsv:3: model.checkpoint: no run of this config is called other; there is base, "
            "long. If it is a run of another config, give its folder, results/other/training",
        ),
        (
            ("base base true",),
            "runs.tsv:2: model.checkpoint: runs start from each other in a circle (base -> "
            "base); let one start from random weights or from a folder",
        ),
        (
            ("a c true", "b a true", "c b true"),
            "runs.tsv:3: model.checkpoint: runs start from each other in a circle (a -> c -> b "
            "-> a); let one start from random weights or from a folder",
        ),
        (
            ("base", "long base"),
            "runs.tsv:3: train.finetune: missing, but model.checkpoint is set; add true (load its "
            "weights, start at step 0) or false (continue with its optimizer states at its step)",
        ),
    ],
)
def test_a_start_that_cannot_exist_is_refused(rows: tuple[str, ...], message: str) -> None:
    assert refused(CHILD, *rows) == message


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("optimizer.name", "lion", "has optimizer states of adamw, not of lion; set"),
        ("train_steps", "40", "is at step 40 already, and the run ends at step 40; "),
        (
            "global_batch_size",
            "8",
            "has consumed 640 samples in 40 steps, with train.global_batch_size and "
            "rampup_batch_size it would be 320; set these as they were, ",
        ),
    ],
)
def test_a_run_that_cannot_be_continued_is_refused(setting: str, value: str, message: str) -> None:
    columns = f"{CHILD} train.train_steps"
    row = "more base false 50"
    if setting == "train_steps":
        row = f"more base false {value}"
    else:
        columns, row = f"{columns} train.{setting}", f"{row} {value}"
    text = refused(columns, "base", row)
    checkpoint = "the last checkpoint of run base"
    assert text.startswith(f"runs.tsv:3: model.checkpoint: {checkpoint}: {message}")
    assert text.endswith("train.finetune to true to load only its weights")


def test_another_schedule_than_in_a_megatron_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer("tokenizer")
    values = {**ARCHITECTURE, "vocab_size": 300}
    architecture = Architecture.model_validate(values)
    notes = {"lr_scheduler": {"lr_decay_style": "cosine", "max_lr": 0.5}}
    start = Checkpoint("hf", tmp_path, architecture, RandomSource(architecture, 1), notes=notes)
    writer.write(tmp_path / "start", start, "native", Target())
    settings = {"finetune": False, "load_optimizer": False}
    config = {"model": {"checkpoint": str(tmp_path / "start")}, "tokenizer": {"path": tokenizer}}
    with pytest.raises(UserError) as caught:
        read_config(train=train(**settings), is_main_process=True, **config)
    message = "the schedule of the checkpoint and of the config differ: train.optimizer.learning_ra"
    assert message in str(caught.value)
    assert str(caught.value).startswith("my.yaml: model.checkpoint: ")
    capsys.readouterr()
    read_config(train=train(**settings, on_change="continue"), is_main_process=True, **config)
    assert message in capsys.readouterr().err


def test_a_mapping_that_names_no_run_is_refused() -> None:
    for checkpoint in ({"rnu": "base"}, {"run": 3}, {}, 7):
        with pytest.raises(UserError) as caught:
            read_config(model={"checkpoint": checkpoint}, train=train(finetune=True))
        assert "model.checkpoint:" in str(caught.value)
        assert "the name of a run of the same table: {run: NAME}" in str(caught.value)


def test_the_chain_of_a_run_that_continues_begins_at_the_end_of_its_parent() -> None:
    columns = f"{CHILD} train.train_steps train.segment_steps"
    config = read_config(runs=write_table(columns, "base", "more base false 100 30"))
    segments = SegmentRules(config, None)
    assert segments.open_ended == []
    assert segments.ends("more") == [60, 90]


def test_the_data_of_a_parent_decide_where_a_chain_begins() -> None:
    columns = f"{CHILD} corpora train.train_steps train.segment_steps"
    Path("epochs.tsv").write_text("corpus\tfiles\tepochs\ndocs\tresults/raw/docs/*\t2\n")
    rows = ("base - - epochs.tsv null -", "more base false corpora.tsv 100 30")
    config = read_config(runs=write_table(columns, *rows))
    assert SegmentRules(config, None).open_ended == ["more"]
