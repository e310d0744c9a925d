"""Detoxification: planned, checked before any job, and toxicity that falls."""

import json
import math
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from tests.support.llamas import window_nats
from tests.support.workflow_configs import read_config, wildcards
from tests.support.workflows import ARCHITECTURE, CONFIG, jobs, make_workspace, snakemake_alone
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.init_model import init_model
from tokamake.config import external_plugins
from tokamake.errors import UserError
from tokamake.preflight.detoxify import check_detoxify
from tokamake.preflight.planned import WorkflowConfig
from tokamake.report.report import report
from tokamake.workflow.checkpoints import CheckpointRules
from tokamake.workflow.detoxify import RULES, DetoxifyRules
from tokamake.workflow.preflight import Preflight

PLAIN = ("the", "a", "model", "text", "token", "step", "loss", "data", "rank", "node", "train")
BAD = ("darn", "heck")
KEPT = "results/data/clean/detoxify/kept.jsonl"
TABLE = f"corpus\tfiles\tweight\tsets\nown\t{KEPT}\t1\ttrain\nplain\theld_out.jsonl\t\tvalid\n"
TRAIN = {
    **CONFIG["train"],  # type: ignore[dict-item]
    **{"finetune": True, "sequence_length": 64, "global_batch_size": 32, "train_steps": 60},
    **{"optimizer": {"learning_rate": 5e-3}, "schedule": {"name": "constant"}},
}
DETOXIFY = {
    "scorer": {"word_list": "words.txt"},
    "prompts": {"path": "prompts.jsonl", "toxicity_key": "toxicity"},
    "num_texts": 240,
    "max_new_tokens": 24,
    "continuations": 4,
    "continuation_tokens": 8,
    "texts_per_job": 120,
}
SECTIONS: dict[str, Any] = {
    "run": "clean",
    "data_set": "clean",
    "corpora": "clean.tsv",
    "sample_corpus": {},
    "train": TRAIN,
}


def sentence(length: int, *, is_bad: bool = False) -> str:
    words = random.choices(PLAIN, k=length)
    return " ".join(random.choice(BAD) if is_bad and random.random() < 0.3 else w for w in words)


def write_texts(folder: Path) -> None:
    """Write a corpus with a bad word in each second line, plain documents, prompts and words."""
    random.seed(1)

    def write(name: str, lines: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("web.jsonl", [{"text": sentence(8, is_bad=n % 2 > 0)} for n in range(1500)])
    write("held_out.jsonl", [{"text": sentence(8)} for _ in range(60)])
    toxicities = [0.9, 0.1, 0.1, None] * 5
    write("prompts.jsonl", [{"prompt": sentence(3), "toxicity": each} for each in toxicities])
    (folder / "words.txt").write_text("\n".join(BAD))


@pytest.fixture
def start(sampled: Path, workspace_here: Path) -> Path:
    """A model with random weights, beside its tokenizer, in the current folder."""
    init_model(
        architecture=Path("architecture.yaml"),
        tokenizer=sampled / "tokenizer",
        seed=1,
        output=Path("start"),
    )
    shutil.copytree(sampled / "tokenizer", "tokenizer")
    write_texts(workspace_here)
    return Path("start")


def perplexity(folder: Path, model: Path) -> float:
    """Perplexity of the held-out documents by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "results/tokenizer")
    texts = (json.loads(line)["text"] for line in (folder / "held_out.jsonl").open())
    ids = [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    most, length = CONFIG["evaluate"]["max_tokens"], TRAIN["sequence_length"]  # type: ignore[index]
    nats, count = window_nats(model, ids[:most], length=length)
    return math.exp(nats / count)


def sections(**changes: Any) -> dict[str, Any]:
    detoxify = {**DETOXIFY, **changes.pop("detoxify", {})}
    model = {"checkpoint": "start"}
    given = {"tokenizer": {"path": "tokenizer"}, "model": model, "detoxify": detoxify}
    return {**CONFIG, **SECTIONS, **given, **changes}


def read(*, table: str = TABLE, **changes: Any) -> WorkflowConfig:
    return read_config(table=table, **{**sections(**changes), "corpora": "corpora.tsv"})


def rules(**changes: Any) -> DetoxifyRules:
    config = read(**changes)
    return DetoxifyRules(config, CheckpointRules(config))


@pytest.mark.usefixtures("start")
def test_each_shard_of_texts_is_a_job(workspace_here: Path) -> None:
    Path("clean.tsv").write_text(TABLE)
    Path("clean.yaml").write_text(yaml.safe_dump(sections()))
    dry_run = ("-n", "--configfile", "clean.yaml", "--")
    planned = jobs(snakemake_alone(workspace_here, *dry_run, "all", "detoxify"))
    # Two shards of samples, one of continuations before, one after.
    assert {name: planned.get(name) for name in (*RULES, "evaluate", "train", "tokenize")} == {
        "generate_texts": 4, "score_texts": 4, "select_texts": 1, "measure_toxicity": 1,
        "detoxify": 1, "evaluate": 2, "train": 1, "tokenize": 2,
    }  # fmt: skip
    assert planned["report"] == 1
    Path("clean.yaml").write_text(yaml.safe_dump({**sections(), "detoxify": None}))
    Path("clean.tsv").write_text(TABLE.replace(KEPT, "web.jsonl"))
    planned = jobs(snakemake_alone(workspace_here, *dry_run, "all"))
    assert not planned.keys() & {*RULES}
    assert planned["evaluate"] == 1


@pytest.mark.usefixtures("start")
def test_the_target_generate_texts_needs_no_scores() -> None:
    """Another program may score the texts of the initial model."""
    made = rules()
    assert made.outputs_before_training(["{texts}/generated-{shard}.jsonl"]) == [
        f"{made.samples}/generated-00000.jsonl",
        f"{made.samples}/generated-00001.jsonl",
        f"{made.before}/generated-00000.jsonl",
    ]


@pytest.mark.usefixtures("start")
def test_a_changed_column_scores_the_shard_again(workspace_here: Path) -> None:
    Path("clean.tsv").write_text(TABLE)
    given = sections(detoxify={"scorer": {"column": "scores.jsonl"}})
    Path("clean.yaml").write_text(yaml.safe_dump(given))
    folder = Path("results/data/clean/detoxify/samples")
    folder.mkdir(parents=True)

    def write(path: Path, lines: list[dict[str, Any]], *, time: float) -> None:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.utime(path, (time, time))

    def planned() -> dict[str, int]:
        made = snakemake_alone(workspace_here, *command)
        assert made.returncode == 0, made.stdout + made.stderr
        told.append(made.stderr)
        return jobs(made)

    allowed = ("--allowed-rules", "score_texts", "select_texts")
    command = ("-n", "--configfile", "clean.yaml", *allowed, "--", "select_texts")
    told: list[str] = []
    now = Path("words.txt").stat().st_mtime
    lines = [{"text": f"text {number}", "toxicity": 0.5} for number in range(3)]
    for shard in range(2):
        write(folder / f"generated-0000{shard}.jsonl", [lines[shard]], time=now - 3)
        write(folder / f"scored-0000{shard}.jsonl", [lines[shard]], time=now - 2)
    write(Path("scores.jsonl"), lines, time=now - 1)  # one more text, with equal scores
    assert planned() == {"select_texts": 1}
    lines[1]["toxicity"] = 0.6
    write(Path("scores.jsonl"), lines, time=now - 1)
    assert planned() == {"score_texts": 1, "select_texts": 1}
    said = f"tokamake: {folder}/scored-00001.jsonl: other scores now: scoring it again"
    assert [said in text for text in told] == [False, True]


@pytest.mark.usefixtures("start")
def test_any_number_of_texts_makes_at_most_500_jobs() -> None:
    made = rules(detoxify={"num_texts": 2_485_000, "texts_per_job": 1000})
    assert len(made.scored(made.samples)) == 500
    last = wildcards(texts=made.samples, shard="00499")
    assert made.generation_options(last)[:2] == ["--num-texts=4970", f"--first={499 * 4970}"]
    # The files are words of one command, whose length Linux limits to 128 KiB.
    assert sum(len(path) + 1 for path in made.scored(made.samples)) < 2**16


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scorer": {"word_list": "gone.txt"}}, "detoxify.scorer: gone.txt: cannot be read"),
        ({"prompts": "gone.jsonl"}, "detoxify.prompts: gone.jsonl: "),
        ({"prompts": {"path": "prompts.jsonl", "key": "text"}}, "prompts.jsonl:1.*no field 'text'"),
    ],
)
def test_mistakes_of_the_section_are_one_line(changes: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^my.yaml: {message}" if "gone" in message else message):
        check_detoxify(read(detoxify=changes))


@pytest.mark.usefixtures("start")
def test_the_scorer_needs_its_packages_unless_conda_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(external_plugins, "find_spec", lambda _: None)
    config = read(detoxify={"scorer": "alt_profanity_check"})
    facts: Any = SimpleNamespace(
        rule_resources=lambda _: {},
        default_resource=lambda _: None,
        launch="",
        is_main_process=True,
        uses_conda=True,
    )
    assert Preflight(config, facts).score_texts(wildcards(), []) == []
    facts.uses_conda = False
    with pytest.raises(SystemExit, match="2"):
        Preflight(config, facts).score_texts(wildcards(), [])
    message = "my.yaml: detoxify.scorer: alt_profanity_check: needs profanity_check, which this"
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("start")
def test_the_dry_run_names_a_column_of_scores_that_does_not_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts: Any = SimpleNamespace(
        rule_resources=lambda _: {},
        default_resource=lambda _: None,
        launch="",
        is_main_process=True,
        uses_conda=False,
    )
    preflight = Preflight(read(detoxify={"scorer": {"column": "scores.jsonl"}}), facts)
    for _ in range(2):
        assert preflight.score_texts(wildcards(), []) == []
    assert capsys.readouterr().err.splitlines() == [
        "tokamake: my.yaml: detoxify.scorer: column: scores.jsonl: no such file; fix the list of "
        "files, or write the scores there before score_texts runs"
    ]
    Path("scores.jsonl").touch()
    Preflight(read(detoxify={"scorer": {"column": "scores.jsonl"}}), facts).score_texts(None, [])
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("start")
def test_the_kept_texts_are_one_shard() -> None:
    changes = {**sections(plan={"shard_bytes": 100}), "corpora": "corpora.tsv"}
    shards = read_config(table=TABLE, **changes).plan.shards
    assert [shard.byte_range for shard in shards if shard.files == (KEPT,)] == [""]
    assert len(shards) > 2


@pytest.mark.usefixtures("start")
def test_the_runs_start_from_the_model_and_read_its_texts() -> None:
    check_detoxify(read())
    with pytest.raises(UserError, match=rf"^my.yaml: detoxify: no corpus reads {KEPT}"):
        check_detoxify(read(table=TABLE.replace(KEPT, "web.jsonl")))
    random_weights = {"model": {"architecture": "architecture.yaml"}}
    train = {name: value for name, value in TRAIN.items() if name != "finetune"}
    with pytest.raises(UserError, match="runs start from random weights; name the model to det"):
        check_detoxify(read(**random_weights, train=train))
    shutil.copytree("start", "other")
    Path("runs.tsv").write_text("run\tmodel.checkpoint\nfirst\tstart\nsecond\tother\n")
    with pytest.raises(UserError, match=r"different models \(first from start, second from other"):
        check_detoxify(read(runs="runs.tsv"))


@pytest.mark.grid
@pytest.mark.slow
def test_toxicity_falls(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path)
    write_texts(folder)
    (folder / "corpora.tsv").write_text("corpus\tfiles\tweight\nweb\tweb.jsonl\t1\n")
    (folder / "clean.tsv").write_text(TABLE)
    architecture = {**ARCHITECTURE, "max_position_embeddings": 64}
    (folder / "architecture.yaml").write_text(yaml.safe_dump(architecture))
    train = {**TRAIN, "train_steps": 150, "optimizer": {"learning_rate": 0.01}}
    del train["finetune"]
    first = {**CONFIG, "sample_corpus": {}, "tokenizer": {"vocab_size": 300}, "train": train}
    (folder / "my.yaml").write_text(yaml.safe_dump(first))
    made = snakemake_alone(folder, "--configfile", "my.yaml", "--", "train")
    assert made.returncode == 0, made.stdout + made.stderr
    start = {
        "tokenizer": {"path": "results/tokenizer"},
        "model": {"checkpoint": "results/smoke/training"},
    }
    (folder / "clean.yaml").write_text(yaml.safe_dump(sections(**start)))
    command = ("--configfile", "clean.yaml", "--", "detoxify")
    made = snakemake_alone(folder, *command)
    assert made.returncode == 0, made.stdout + made.stderr
    results = json.loads((folder / "results/clean/detoxify.json").read_text())
    before, after = results["before"], results["after"]
    assert before["all"]["prompts"] == 20
    assert before["toxic"]["prompts"] == 5
    assert after["all"]["expected_maximum_toxicity"] < before["all"]["expected_maximum_toxicity"]
    assert after["all"]["toxicity_probability"] < before["all"]["toxicity_probability"]
    convert(source=folder / "results/smoke/training", target=folder / "start", format="hf")
    for measured, model in ((before, folder / "start"), (after, folder / "results/clean/export")):
        assert measured["perplexity"] == pytest.approx(perplexity(folder, model), rel=1e-3)
    texts = results["texts"]
    assert texts["kept"]["number"] == texts["scored"]["number"] // 2
    assert texts["kept"]["mean"] < texts["scored"]["mean"]
    report(folder / "results")
    page = (folder / "results/report.html").read_text()
    assert "toxicity probability: all prompts (20)" in page
    # A lost shard is written again with the same bytes.
    shard = folder / "results/data/clean/detoxify/samples/generated-00001.jsonl"
    earlier = shard.read_bytes()
    shard.unlink()
    made = snakemake_alone(
        folder, "--configfile", "clean.yaml", "--", str(shard.relative_to(folder))
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert shard.read_bytes() == earlier
