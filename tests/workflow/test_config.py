"""The checked config: what follows from it before any job runs, and mistakes that end it."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.berts import bert
from tests.support.workflow_configs import make_tokenizer, read_config, refused, train, write_runs
from tests.support.workflows import ARCHITECTURE, CONFIG
from tokamake.config.architecture import Architecture
from tokamake.data.mixture.weigh import read_listed_corpora
from tokamake.errors import UserError
from tokamake.preflight import initial_models
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.config import _report_lists, check_config_files, read_workflow_config

pytestmark = pytest.mark.usefixtures("workspace_here")


def test_sample_files_have_known_keys() -> None:
    table = "corpus\tfiles\ttext_key\tweight\ncode\tresults/raw/code/*\ttext,title\t1\n"
    assert refused(table=table, is_main_process=True) == (
        "corpora.tsv:2: text_key: title: documents of sample_corpus have text, src, id; name one "
        "of these keys"
    )


# What follows from a config


def test_one_run_has_its_tables_corpora_and_sample_files() -> None:
    config = read_config()
    assert list(config.runs) == ["smoke"]
    assert config.shared is config.runs["smoke"]
    assert config.tables == {"smoke": list(config.corpora.values())}
    assert list(config.corpora) == ["code", "docs"]
    assert config.sample_files == {
        "results/raw/code/code-00.jsonl": 80_000,
        "results/raw/code/code-01.jsonl.gz": 80_000,
        "results/raw/docs/docs-00.jsonl": 60_000,
        "results/raw/docs/docs-01.jsonl.gz": 60_000,
    }
    assert config.splits == []


def test_shards_merged_datasets_and_batches_are_found_by_name() -> None:
    config = read_config(plan={"shard_bytes": 50_000, "merged_bytes": 45_000, "max_jobs": 2})
    assert list(config.shards) == [f"{name}/0000{n}" for name in ("code", "docs") for n in range(3)]
    assert config.shards["docs/00001"].byte_range == "30000:"
    assert config.merged["docs-0000_text_document"].shards == ("docs/00000", "docs/00001")
    assert config.tokenize_batches == {
        f"{name}-00000": tuple(f"{name}/0000{n}" for n in range(3)) for name in ("code", "docs")
    }
    merged = tuple(f"{name}-000{n}_text_document" for name in ("code", "docs") for n in range(2))
    assert config.merge_batches == {"code-00000": merged}  # a quarter as many jobs


def test_splits_are_those_that_corpora_name_once_and_in_order() -> None:
    table = (
        "corpus\tfiles\tweight\tsets\n"
        "code\tresults/raw/code/*\t2\ttrain=0:0.8 valid=0.8:0.9 hard=0.9:1\n"
        "docs\tresults/raw/docs/*\t1\ttrain=0:0.9 hard=0.9:1\n"
    )
    assert read_config(table=table).splits == ["valid", "hard"]


def test_runs_of_a_table_share_shards_and_have_their_own_corpora() -> None:
    rows = {name: f"{name}\tresults/raw/{name}/*\t1\n" for name in ("code", "docs")}
    Path("code.tsv").write_text("corpus\tfiles\tweight\n" + rows["code"])
    Path("docs.tsv").write_text("corpus\tfiles\tweight\n" + rows["docs"])
    config = read_config(runs=write_runs("run corpora", "a code.tsv", "b docs.tsv", "c code.tsv"))
    assert list(config.runs) == ["a", "b", "c"]
    tables = {run: [corpus.corpus for corpus in rows] for run, rows in config.tables.items()}
    assert tables == {"a": ["code"], "b": ["docs"], "c": ["code"]}
    assert list(config.corpora) == ["code", "docs"]
    assert {merge.corpus for merge in config.plan.merged} == {"code", "docs"}


def test_two_readings_of_a_config_are_equal() -> None:
    assert read_config() == read_config()


def test_garbage_collection_goes_on_after_a_mistake() -> None:
    assert "unknown key" in refused(trian={})
    assert gc.isenabled()


# Mistakes


def test_two_runs_are_not_uploaded_to_one_place() -> None:
    runs = write_runs("run export.push", "a hf://org/gpt", "b hf://org/gpt@b", "c hf://org/gpt")
    assert refused(runs=runs).startswith(
        f"{runs}:4: export.push: hf://org/gpt: run a is uploaded there; give each run a repository"
    )


@pytest.mark.parametrize(
    ("setting", "sections"),
    [
        ("corpora", {"corpora": "{x}.tsv"}),
        ("tokenizer.path", {"tokenizer": {"path": "{x}.tsv"}}),
        ("model.architecture", {"model": {"architecture": "{x}.tsv"}}),
        (
            "model.checkpoint",
            {"model": {"checkpoint": "{x}.tsv"}, "train": {"finetune": True}},
        ),
    ],
)
def test_braces_in_a_path_are_refused(setting: str, sections: dict[str, Any]) -> None:
    assert refused(**sections) == (
        f"my.yaml: {setting}: {{x}}.tsv: braces in a path are wildcards of Snakemake; rename the "
        "file or folder, or give a link to it"
    )


def test_braces_without_a_name_are_no_wildcard() -> None:
    Path("{}.yaml").write_text(yaml.safe_dump(ARCHITECTURE))
    assert read_config(model={"architecture": "{}.yaml"}).shared.model.stated == Path("{}.yaml")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"tokenizer": {"path": "none"}},
            "tokenizer.path: none: no such file or folder; fix",
        ),
        (
            {"model": {"architecture": "none.yaml"}},
            "model.architecture: none.yaml: no such file; fix the path, or choose",
        ),
        (
            {"tokenize": {"near_duplicates": {"against": ["none.keys"]}}},
            "tokenize.near_duplicates.against: none.keys: no such file; fix the path, or build",
        ),
    ],
)
def test_a_missing_file_names_its_setting(sections: dict[str, Any], message: str) -> None:
    assert refused(**sections, is_main_process=True).startswith(f"my.yaml: {message}")


def test_a_mistake_of_one_run_names_its_line() -> None:
    runs = write_runs("run train.sequence_length", "short 32", "long 65")
    assert refused(runs=runs) == (
        "runs.tsv:3: train.sequence_length: 65: more than the 64 max_position_embeddings of "
        "architecture.yaml; lower it"
    )


def test_sequences_may_be_as_long_as_the_model_allows() -> None:
    assert read_config(train=train(sequence_length=64)).shared.train.sequence_length == 64


def test_all_config_files_are_named_relative_to_the_current_folder(workspace_here: Path) -> None:
    with pytest.raises(UserError, match=r"^my\.yaml, more/other\.yaml: trian: unknown key"):
        read_workflow_config(
            {**CONFIG, "trian": {}},
            [workspace_here / "my.yaml", "more/other.yaml"],
            is_main_process=False,
        )


def test_a_layout_that_does_not_fit_the_model_is_refused() -> None:
    settings = train(parallel={"tensor_parallel_size": 3})
    message = refused(train=settings)
    assert message.startswith("my.yaml: train.parallel.tensor_parallel_size: 3: does not divide 4")


def test_a_format_that_does_not_fit_the_model_is_refused() -> None:
    assert refused(convert=["hf", "mds-tp3"]) == (
        "my.yaml: convert: mds-tp3: tp3: does not divide num_attention_heads 4; give one of 1, 2, 4"
    )


# Length of a run, and its splits


def test_a_run_needs_a_length_or_epochs_of_the_corpora_that_train() -> None:
    table = (
        "corpus\tfiles\tweight\tepochs\tsets\n"
        "code\tresults/raw/code/*\t\t2\t\ndocs\tresults/raw/docs/*\t{}\t{}\t{}\n"
    )
    settings = train(train_steps=None)
    assert refused(table=table.format(1, "", ""), train=settings) == (
        "my.yaml: train: no length of the run; set train_steps, train_samples or train_tokens, "
        "or epochs of docs"
    )
    assert read_config(table=table.format("", 1, ""), train=settings)
    assert read_config(table=table.format("", "", "valid=0:1"), train=settings)
    assert read_config(table=table.format(1, "", ""))


# Initial checkpoints and tokenizers


def make_start(folder: str, *words: str) -> str:
    """Write a folder that looks like a Hugging Face checkpoint, with a tokenizer of some words."""
    if words:
        make_tokenizer(folder, *words)
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "config.json").touch()
    Path(folder, "model.safetensors").touch()
    return folder


def read_start(
    monkeypatch: pytest.MonkeyPatch, *, vocab_size: int = 100, start: Any = None, **config: Any
) -> WorkflowConfig:
    """Read the config of a main process; each checkpoint has the same architecture."""
    architecture = Architecture(**{**ARCHITECTURE, "vocab_size": vocab_size})  # type: ignore[arg-type]
    start = start or SimpleNamespace(architecture=architecture, notes={}, path=Path("start"))
    monkeypatch.setattr(initial_models, "open_any", lambda _: start)
    settings = train(finetune=True)
    model = {"checkpoint": "start"}
    config = {"train": settings, "model": model, "tokenizer": {}, **config}
    return read_config(is_main_process=True, **config)


def test_a_tokenizer_that_is_trained_is_in_results() -> None:
    config = read_config()
    assert config.given_tokenizer is None
    assert config.tokenizer_files == [
        "results/tokenizer/tokenizer.json", "results/tokenizer/tokenizer_config.json"
    ]  # fmt: skip


def test_the_tokenizer_of_the_config_comes_before_that_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_start("start", "a", "b")
    config = read_start(monkeypatch)
    assert config.tokenizer_files == ["start/tokenizer.json", "start/tokenizer_config.json"]
    path = make_tokenizer("other", "a")
    config = read_start(monkeypatch, tokenizer={"path": path})
    assert config.tokenizer_files == ["other/tokenizer.json", "other/tokenizer_config.json"]


def test_a_checkpoint_without_a_tokenizer_needs_one_in_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_start("start")
    with pytest.raises(UserError) as caught:
        read_start(monkeypatch)
    message = (
        "my.yaml: tokenizer.path: missing: model.checkpoint start has no tokenizer beside it; name "
        "the one that it was trained with"
    )
    assert str(caught.value) == message


def test_a_native_checkpoint_names_the_tokenizer_that_it_was_trained_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path("start/global_step2")
    folder.mkdir(parents=True)
    Path("start/latest").write_text("global_step2")
    (folder / "tokamake.json").touch()
    (folder / "run.yaml").write_text("tokenizer: /models/tokenizer.json\n")
    with pytest.raises(UserError, match=r"trained with \(/models/tokenizer\.json\)$"):
        read_start(monkeypatch)


@pytest.mark.parametrize(("vocab_size", "fits"), [(4, True), (3, True), (2, False)])
def test_the_vocabulary_of_the_checkpoint_covers_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, fits: bool
) -> None:
    make_start("start", "x")
    tokenizer = {"path": make_tokenizer("tokenizer", "a", "b")}
    if fits:
        assert read_start(monkeypatch, vocab_size=vocab_size, tokenizer=tokenizer)
        return
    with pytest.raises(UserError) as caught:
        read_start(monkeypatch, vocab_size=vocab_size, tokenizer=tokenizer)
    assert str(caught.value) == (
        "my.yaml: tokenizer.path: tokenizer: has 3 entries, model.checkpoint start has 2 "
        "embeddings; use the tokenizer of the checkpoint"
    )


def test_runs_with_different_tokenizers_cannot_share_data(monkeypatch: pytest.MonkeyPatch) -> None:
    make_start("start", "a", "b")
    make_start("same", "a", "b")
    make_start("different", "a", "c")
    runs = write_runs("run model.checkpoint", "a start", "b same")
    assert read_start(monkeypatch, runs=runs).tokenizer_files[0] == "start/tokenizer.json"
    write_runs("run model.checkpoint", "a start", "b same", "c different")
    with pytest.raises(UserError) as caught:
        read_start(monkeypatch, runs=runs)
    assert str(caught.value) == (
        "runs.tsv:4: model.checkpoint: different/tokenizer.json is another tokenizer than "
        "start/tokenizer.json of run a, and runs share their data; name one that fits all in "
        "tokenizer.path, or build the runs from configs of their own, each with its data_set"
    )
    tokenizer = {"path": "different"}
    assert read_start(monkeypatch, runs=runs, tokenizer=tokenizer).given_tokenizer


def test_the_model_of_a_checkpoint_is_checked_by_the_main_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_start("start", "a", "b")
    calls: list[Path] = []

    def fail(checkpoint: Path) -> None:
        calls.append(checkpoint)
        raise UserError("start: no checkpoint")

    monkeypatch.setattr(initial_models, "open_any", fail)
    sections = {"train": train(finetune=True), "model": {"checkpoint": "start"}, "tokenizer": {}}
    assert read_config(**sections)
    assert calls == []
    with pytest.raises(UserError, match=r"^my\.yaml: model\.checkpoint: start: no checkpoint$"):
        read_config(is_main_process=True, **sections)
    assert calls == [Path("start")]


def test_the_model_of_a_checkpoint_must_allow_the_sequence_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_start("start", "a")
    with pytest.raises(UserError, match="more than the 64 max_position_embeddings of start; lower"):
        read_start(monkeypatch, train=train(finetune=True, sequence_length=65))


def test_the_model_of_a_checkpoint_must_learn_the_objective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_start("start", "a")
    start = SimpleNamespace(architecture=bert(), notes={}, path=Path("start"))
    with pytest.raises(UserError) as caught:
        read_start(monkeypatch, start=start)
    remedy, _, families = str(caught.value).rpartition(" families ")
    assert remedy == (
        "my.yaml: train.objective: causal: family bert learns masked; set it to masked, or choose "
        "a model of one of the"
    )
    assert {"gpt", "llama"} <= {*families.split(", ")}
    assert "t5" not in families


def test_the_start_names_the_corpora_of_a_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "list.txt"
    path.write_text("".join(f"1 a/c{number % 9}_{number}_text_document\n" for number in range(10)))
    _report_lists({path: read_listed_corpora(path, None), None: []})
    assert capsys.readouterr().err == (
        f"tokamake: {path}: corpora c0 (2 datasets), c1 (1 dataset), c2 (1 dataset), "
        "c3 (1 dataset), c4 (1 dataset), c5 (1 dataset), c6 (1 dataset), c7 (1 dataset) and 1 "
        "more\n"
    )


# Config files, before Snakemake reads them


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"a: 1\na: 2\n", r"^my\.yaml:2: a: is in line 1, too"),
        (b"a:\n\tb: 2\n", r"^my\.yaml:2: indented with a tab"),
        (b"a: \xff\n", r"my\.yaml: not UTF-8"),
    ],
)
def test_mistakes_name_the_file_as_the_user_wrote_it(
    workspace_here: Path, text: bytes, expected: str
) -> None:
    Path("my.yaml").write_bytes(text)
    with pytest.raises(UserError, match=expected):
        check_config_files([workspace_here / "my.yaml"])


@pytest.mark.parametrize(
    "text", ['{\n\t"a": 1\n}\n', "__use_yte__: true\n?if True:\n  a: 1\n?if True:\n  b: 1\n"]
)
def test_json_and_templates_that_snakemake_reads_are_valid(text: str) -> None:
    Path("my.yaml").write_text(text)
    check_config_files(["my.yaml", "none.yaml"])
