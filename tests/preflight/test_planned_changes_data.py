"""Data that runs of another config were trained on are not replaced without a question."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.workflow_configs import RAW_TABLE, add_raw, make_tokenizer, read_config
from tokamake.data.corpus.plan_file import write_plan
from tokamake.data.indexed.manifest import write_manifest
from tokamake.data.tokenizers import fingerprint
from tokamake.errors import UserError
from tokamake.preflight.planned import WorkflowConfig
from tokamake.preflight.planned_changes import check_replaced, write_settings

RUN = {"data_root": "results/data", "index": "results/first/index"}
REFUSED = (
    ". The data of run first in results/data would be written again: give this config its own data "
    "folder (data_set: NAME), undo the change, or replace them (--config replace_data=true)"
)
CHECK = {"table": RAW_TABLE, "is_main_process": True}


@pytest.fixture(autouse=True)
def trained(workspace_here: Path) -> WorkflowConfig:
    """A workspace in which another config has built the run `first`."""
    add_raw("0.jsonl")
    config = read_config(**CHECK, run="first")
    write_plan(Path(config.data_set.plan), config.plan)
    write_settings(config)
    tokenizer = make_tokenizer("results/tokenizer", "a", "b")
    paths = [Path(tokenizer, name) for name in ("tokenizer.json", "tokenizer_config.json")]
    merged = Path("results/data/merged/web-0000_text_document.json")
    merged.parent.mkdir()
    raw = {"path": "raw/0.jsonl", "unit": "line", "byte_range": None, "bytes": 9, "sha256": ""}
    source = {"inputs": [raw]}
    facts = {"tokenizer": fingerprint(paths), "vocab_size": 500, "append_eod": True}
    write_manifest(merged, {"sha256": {}, "sources": [source], **facts})
    index = Path("results/first/index/index.json")
    index.parent.mkdir(parents=True)
    index.write_text(json.dumps({"pairs": {"merged/web-0000_text_document": {}}}))
    Path("results/first/run.yaml").write_text(yaml.safe_dump(RUN))
    return config


def refused(**sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(**sections)
    return str(caught.value)


def check(**sections: Any) -> None:
    check_replaced(read_config(**{**CHECK, **sections}))


def test_another_run_with_the_same_data_is_fine() -> None:
    check()
    # The tokenizer that was trained here, by its path, is the same one.
    check(tokenizer={"path": "results/tokenizer"})


def test_settings_that_would_write_the_data_again_are_refused() -> None:
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("tokenizer.vocab_size 500 -> 600", {"tokenizer": {"vocab_size": 600}}),
        ("tokenize.prepend_bos False -> True", {"tokenize": {"prepend_bos": True}}),
        ("corpora.web.format empty -> jsonl", {"table": RAW_TABLE_OF_JSONL}),
    )
    for line, sections in changes:
        assert refused(**sections) == f"data_set default: {line}{REFUSED}"


RAW_TABLE_OF_JSONL = "corpus\tfiles\tformat\tweight\nweb\traw/*.jsonl\tjsonl\t1\n"


def test_a_corpus_that_the_run_does_not_use_may_change() -> None:
    Path("x.jsonl").write_text('{"text": "another document"}\n')
    header = "corpus\tfiles\tweight\tformat\nweb\traw/*.jsonl\t1\t\n"
    sections = {"tokenizer": {"path": "results/tokenizer"}}
    config = read_config(**{**CHECK, "table": f"{header}web.x\tx.jsonl\t1\t\n"}, **sections)
    write_plan(Path(config.data_set.plan), config.plan)
    write_settings(config)
    check(table=f"{header}web.x\tx.jsonl\t1\tjsonl\n", **sections)


def test_another_tokenizer_is_refused() -> None:
    path = make_tokenizer("mine", "x", "y", "z")
    assert refused(tokenizer={"path": path}).startswith("data_set default: tokenizer ")


def test_a_damaged_record_of_the_data_is_named(trained: WorkflowConfig) -> None:
    Path(trained.data_set.settings).write_text("[]")
    with pytest.raises(UserError, match=r"data_set\.json: damaged: not a JSON object; remove it"):
        check(tokenizer={"vocab_size": 600})


def test_a_changed_raw_file_is_refused() -> None:
    os.utime("raw/0.jsonl", (1, 1))
    line = "corpus web: changed merged/web-0000_text_document"
    assert refused() == f"data_set default: {line}{REFUSED}"


def test_a_new_raw_file_is_added() -> None:
    add_raw("1.jsonl")
    check()
    assert len(read_config(**CHECK).plan.merged) == 2


def test_another_table_with_the_same_name_of_a_corpus_is_refused() -> None:
    Path("other.jsonl").write_text('{"text": "another document"}\n')
    table = "corpus\tfiles\tweight\nweb\tother.jsonl\t1\n"
    line = "corpus web: changed merged/web-0000_text_document"
    # The plan knows the corpus; without it, the manifest does.
    assert refused(table=table).startswith("data_set default: ")
    Path("results/data/plan.json").unlink()
    assert refused(table=table) == f"data_set default: {line}{REFUSED}"


def test_a_tokenizer_is_not_trained_again_on_other_corpora() -> None:
    Path("more.jsonl").write_text('{"text": "another document"}\n')
    table = "corpus\tfiles\tweight\nmore\tmore.jsonl\t1\n"
    line = "the tokenizer is trained on other corpora"
    assert refused(table=table) == f"data_set default: {line}{REFUSED}"
    # With a tokenizer that exists, other corpora are only added.
    check(table=table, tokenizer={"path": "results/tokenizer"})


def test_a_folder_of_an_earlier_version_is_protected_by_its_manifests() -> None:
    Path("results/data/data_set.json").unlink()
    check()
    message = refused(tokenizer={"vocab_size": 600}, tokenize={"append_eod": False})
    lines = "tokenize.append_eod True -> False, tokenizer.vocab_size 500 -> 600"
    assert message == f"data_set default: {lines}{REFUSED}"


def test_without_a_plan_a_raw_file_newer_than_its_dataset_is_refused(
    trained: WorkflowConfig,
) -> None:
    Path(trained.data_set.plan).unlink()
    Path("results/data/data_set.json").unlink()
    check()
    os.utime("raw/0.jsonl", (2e9, 2e9))
    assert "corpus web: changed merged/web-0000_text_document." in refused()


def test_the_data_are_replaced_if_the_user_asks(capsys: pytest.CaptureFixture[str]) -> None:
    check(tokenizer={"vocab_size": 600}, replace_data=True)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "tokamake: data_set default: tokenizer.vocab_size 500 -> 600. replace_data is true: "
        "results/data is written again, and the data of run first are lost"
    )


def test_a_data_set_of_its_own_replaces_nothing() -> None:
    check(tokenizer={"vocab_size": 600}, data_set="v600")


def test_runs_of_the_config_are_left_to_on_change() -> None:
    check(run="first", tokenizer={"vocab_size": 600})


def test_a_run_of_other_data_is_no_reason_to_refuse() -> None:
    Path("results/first/run.yaml").write_text(yaml.safe_dump({**RUN, "data_root": "elsewhere"}))
    check(tokenizer={"vocab_size": 600})


def test_the_record_keeps_corpora_of_other_configs() -> None:
    Path("more.jsonl").write_text('{"text": "another document"}\n')
    table = "corpus\tfiles\tweight\nmore\tmore.jsonl\t1\n"
    config = read_config(**{**CHECK, "table": table}, tokenizer={"path": "results/tokenizer"})
    write_settings(config)
    record = json.loads(Path("results/data/data_set.json").read_text())
    assert list(record["corpora"]) == ["web", "more"]
    assert record["tokenizer"]["vocab_size"] == 500  # of the one in results/tokenizer
    written = Path("results/data/data_set.json").stat().st_mtime_ns
    write_settings(config)
    assert Path("results/data/data_set.json").stat().st_mtime_ns == written
