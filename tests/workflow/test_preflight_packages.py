"""Optional packages that a config needs are named by the dry run, before any job."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.workflow_configs import read_config, train, wildcards
from tests.support.workflows import CONFIG, CORPORA, MINE, make_workspace, snakemake
from tokamake.data.filters.length import Filter as Length
from tokamake.data.indexed.paths import corpus_of
from tokamake.preflight import packages
from tokamake.preflight.packages import check_corpus_filters
from tokamake.workflow import preflight
from tokamake.workflow.preflight import Preflight


def check(monkeypatch: pytest.MonkeyPatch, rule: str, **resources: str) -> None:
    """Check a run with torchao, as a dry run on a machine without optional packages and PBS."""
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    monkeypatch.setattr(preflight, "find_spec", lambda _: None)
    snakemake: Any = SimpleNamespace(
        rule_resources=lambda name: resources if name == rule else {},
        default_resource=lambda _: None,
        launch="",
        is_main_process=True,
        uses_conda=False,
    )
    config: Any = read_config(train=train(optimizer={"name": "adamw_8bit"}))
    run = wildcards(run="smoke", segment="")
    if rule == "train":
        Preflight(config, snakemake).train(run, [])
    else:
        config = SimpleNamespace(finetuned=config.runs)
        Preflight(config, snakemake).finetune(run, [])


@pytest.mark.parametrize("rule", ["train", "finetune"])
@pytest.mark.usefixtures("workspace_here")
def test_only_ranks_in_an_image_have_packages_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    monkeypatch.delenv("JOB_CONTAINER", raising=False)
    with pytest.raises(SystemExit):
        check(monkeypatch, rule)
    assert "run smoke: train.optimizer.name: adamw_8bit: needs torchao" in capsys.readouterr().err
    check(monkeypatch, rule, container="tokamake.sif")
    monkeypatch.setenv("JOB_CONTAINER", "tokamake.sif")
    check(monkeypatch, rule)


@pytest.mark.usefixtures("workspace_here")
def test_filters_of_a_corpus_need_packages_unless_conda_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Length, "packages", ("gone",))
    table = CORPORA.splitlines()
    filters = ["filters", "length: {min_words: 3}", *([""] * (len(table) - 2))]
    config = read_config(table="\n".join(map("\t".join, zip(table, filters, strict=True))) + "\n")
    snakemake: Any = SimpleNamespace(
        rule_resources=lambda _: {},
        default_resource=lambda _: None,
        launch="",
        is_main_process=True,
        uses_conda=False,
    )
    filtered, *others = map(corpus_of, config.tokenize_batches)
    for batch in config.tokenize_batches:
        if corpus_of(batch) != filtered:
            assert Preflight(config, snakemake).tokenize(wildcards(batch=batch), []) == []
    assert others
    batch = next(iter(config.tokenize_batches))
    with pytest.raises(SystemExit):
        Preflight(config, snakemake).tokenize(wildcards(batch=batch), [])
    message = f"corpus {filtered}: filters: length: needs gone, which this Python environment lacks"
    assert message in capsys.readouterr().err
    snakemake.uses_conda = True
    assert Preflight(config, snakemake).tokenize(wildcards(batch=batch), []) == []


@pytest.mark.usefixtures("workspace_here")
def test_an_evaluation_set_without_the_field_is_refused_before_any_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("set.jsonl").write_text('{"question": "a b c"}\n')
    config = read_config(tokenize={"filters": [{"decontaminate": {"files": {"set": "set.jsonl"}}}]})
    snakemake: Any = SimpleNamespace(
        rule_resources=lambda _: {},
        default_resource=lambda _: None,
        launch="",
        is_main_process=True,
        uses_conda=False,
    )
    batch = next(iter(config.tokenize_batches))
    with pytest.raises(SystemExit):
        Preflight(config, snakemake).tokenize(wildcards(batch=batch), [])
    message = "filters: decontaminate: set.jsonl:1: no field text; its fields are question: fix"
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("workspace_here")
def test_a_filter_that_reads_fields_without_naming_them_is_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Readers of tables skip columns that no filter names."""
    body = (
        "from typing import ClassVar\nfrom tokamake.data.filters import DocumentFilter\n"
        "class Filter(DocumentFilter):\n    metadata_keys: ClassVar = {}\n"
        "    def apply(self, document):\n        document.metadata['url']\n"
    )
    Path("own.py").write_text(body.format("()"))
    Path("named.py").write_text(body.format("('url',)"))
    config = read_config(tokenize={"filters": ["own.py", "named.py"]})
    corpus = next(iter(config.corpora))
    check_corpus_filters(config, corpus)
    assert capsys.readouterr().err.splitlines() == [
        f"tokamake: corpus {corpus}: filters: own.py: reads document.metadata, but its "
        "metadata_keys name no field; tables, such as parquet and csv, have only fields that are "
        "named: add metadata_keys"
    ]


WITHOUT_TORCHAO = """
from tokamake.preflight import packages

find = packages.find_spec
packages.find_spec = lambda name: None if name == "torchao" else find(name)
include: "workflow/Snakefile"
"""


@pytest.mark.slow
def test_the_dry_run_names_it(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path)
    (folder / "Snakefile").write_text(WITHOUT_TORCHAO)
    train = {**CONFIG["train"], "optimizer": {"name": "adamw_8bit"}}
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "train": train}))
    result = snakemake(folder, "-n", *MINE, "train")
    assert result.returncode == 2
    assert "tokamake: run smoke: train.optimizer.name: adamw_8bit: needs torchao" in result.stderr
    assert (
        snakemake(folder, "-n", *MINE, "data").returncode == 0
    )  # data need no package of training
