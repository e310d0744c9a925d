"""What is known to be wrong before any tensor is read."""

from pathlib import Path

import pytest

from tests.support.finetunes import small_bert, write_vocabulary
from tokamake import files
from tokamake.config.finetune import FinetuneSettings
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight.finetune import (
    SETTINGS_RECORD,
    changed_settings,
    check_files,
    check_model,
    check_settings,
    decide_changed,
    finetune_settings,
)


def test_files_that_do_not_exist_name_their_setting(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").touch()
    values = {"task": "rte", "train_files": f"{tmp_path}/*.tsv"}
    settings = FinetuneSettings(**values, validation_files=str(tmp_path / "a.tsv"))
    assert check_files(settings) == [tmp_path / "a.tsv"] * 2
    settings = FinetuneSettings(
        **values,
        validation_files=str(tmp_path / "a.tsv"),
        test_files={"other": str(tmp_path / "b.tsv")},
    )
    with pytest.raises(UserError, match=r"finetune.test_files.other: .*b.tsv"):
        check_files(settings)


def test_rows_and_tokens_must_fit_the_model(tmp_path: Path) -> None:
    vocabulary, shape = write_vocabulary(tmp_path), small_bert()
    check_model(TrainSettings(sequence_length=32), shape, tokenizer=vocabulary, source="bert")
    with pytest.raises(UserError, match=r"sequence_length: 64: more than the 32 .* of bert"):
        check_model(TrainSettings(sequence_length=64), shape, tokenizer=None, source="bert")
    small = small_bert(vocab_size=7)
    with pytest.raises(UserError, match=r"has 24 entries, the model 7 embeddings"):
        check_model(TrainSettings(sequence_length=32), small, tokenizer=vocabulary, source="bert")


def test_mistakes_in_settings_are_of_the_user() -> None:
    with pytest.raises(UserError, match=r"train.backend: deepspeed"):
        check_settings(TrainSettings(backend="deepspeed"))


def test_a_dry_run_compares_settings_without_the_facts_of_a_job(tmp_path: Path) -> None:
    finetune = FinetuneSettings(task="rte", train_files="a.tsv", validation_files="b.tsv")
    train = TrainSettings()
    made = finetune_settings(train, finetune, seed=3, weights="d" * 64, train_rows="e" * 64)
    assert changed_settings(tmp_path, made) == "its settings are not known"
    files.write_json(tmp_path / SETTINGS_RECORD, made)
    planned = finetune_settings(train, finetune, seed=3)
    logged = finetune_settings(train.model_copy(update={"log_interval": 7}), finetune, seed=3)
    assert [changed_settings(tmp_path, each) for each in (made, planned, logged)] == ["", "", ""]
    changed = finetune_settings(train, finetune, seed=3, weights="f" * 64)
    assert changed_settings(tmp_path, changed) == "weights differs"
    other = changed_settings(tmp_path, finetune_settings(train, finetune, seed=4))
    assert other == "seed 3 -> 4"
    with pytest.raises(UserError, match=r"of another run: seed 3 -> 4\. Give the run another name"):
        decide_changed(tmp_path, other, on_change="refuse")
    text = decide_changed(tmp_path, other, on_change="restart")
    assert text == "starts again, because of seed 3 -> 4"
