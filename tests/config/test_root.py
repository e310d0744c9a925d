"""Checks of the whole config: each mistake is one line with its place, value and remedy."""

from importlib import import_module
from inspect import getmembers, isclass
from pathlib import Path

import pytest
import yaml

import tokamake.config
from tests.support.paths import ROOT
from tokamake.config.architecture_files import read_architecture
from tokamake.config.fields import Settings
from tokamake.config.model import ModelSettings
from tokamake.config.resolved_run import ResolvedTrainSettings, Run, read_run, write_run
from tokamake.config.root import Config, schema
from tokamake.config_files import validate
from tokamake.data.corpus.corpora import Corpus, read_corpora
from tokamake.errors import UserError


def error_of(value: object) -> str:
    with pytest.raises(UserError) as caught:
        validate(Config, value, "my.yaml")
    return str(caught.value)


MISTAKES = {
    "my.yaml: trian: unknown key; did you mean train?": {"trian": {}},
    "my.yaml: train.lr: unknown key; this section knows finetune, ": {"train": {"lr": 1}},
    "my.yaml: train.learning_rate: unknown key; did you mean train.optimizer.learning_rate?": {
        "train": {"learning_rate": 1}
    },
    "my.yaml: train_steps: unknown key; did you mean train.train_steps?": {"train_steps": 1},
    "my.yaml: train.train_steps, train_samples and train_tokens all give the run's length": {
        "train": {"train_steps": 5, "train_samples": 5, "train_tokens": 5}
    },
    "my.yaml: convert: 'nope': give a format": {"convert": ["hf", "nope"]},
    "my.yaml: train.optimizer.lr: unknown key; this section knows name, learning_rate": {
        "train": {"optimizer": {"lr": 1}}
    },
    "my.yaml: train.optimizer.name: 'adamww': unknown name; did you mean adamw or adam?": {
        "train": {"optimizer": {"name": "adamww"}}
    },
    "my.yaml: train.schedule.name: 'cosin': unknown name; did you mean cosine?": {
        "train": {"schedule": {"name": "cosin"}}
    },
    "my.yaml: train.train_steps: -3: give an integer of 1 or more": {"train": {"train_steps": -3}},
    "my.yaml: train.split: '9': give two or three non-negative numbers": {"train": {"split": "9"}},
    "my.yaml: train.split: [9]: give two or three non-negative numbers": {"train": {"split": [9]}},
    "my.yaml: train.global_batch_size 5 is not a multiple of micro_batch_size 2": {
        "train": {"global_batch_size": 5, "micro_batch_size": 2}
    },
    "my.yaml: train.schedule.decay_steps: 3: ends before schedule.warmup_steps: 4; raise it": {
        "train": {"train_steps": 5, "schedule": {"warmup_steps": 4, "decay_steps": 3}}
    },
    "my.yaml: train.train_steps and train_tokens both give the run's length": {
        "train": {"train_steps": 5, "train_tokens": 5}
    },
    "my.yaml: train.train_tokens: 4095: does not fill a global batch of 8 × 512 tokens; raise it": {
        "train": {"train_tokens": 4095}
    },
    "my.yaml: train.rampup_batch_size: from 3 by 2 it never reaches global_batch_size 8": {
        "train": {"rampup_batch_size": [3, 2, 9]}
    },
    "my.yaml: train.zero_stage: 0: DeepSpeed keeps no fp32 master weights with bf16; set": {
        "train": {"zero_stage": 0, "precision": "bf16", "backend": "deepspeed"}
    },
    "my.yaml: train.split: 'nan,1,1': give two or three non-negative numbers": {
        "train": {"split": "nan,1,1"}
    },
    "my.yaml: generate.prompts: []": {"generate": {"prompts": []}},
    "my.yaml: run: 'data': results/data is reserved": {"run": "data"},
    "my.yaml: run: 'a b': give letters, digits, '.', '_' or '-', the first one a letter or digit": {
        "run": "a b"
    },
    "my.yaml: sample_corpus has no corpus 'web'; choose code or docs": {
        "sample_corpus": {"web": {}}
    },
    "my.yaml: model.architecture: null: there is no checkpoint; name a file of config/models": {
        "model": {"architecture": None}
    },
    "my.yaml: model.architecture: give the YAML file of an architecture, such as ": {
        "model": {"architecture": {"family": "gpt"}}
    },
    "my.yaml: model.architecture: from_checkpoint: there is no checkpoint; name a file of": {
        "model": {"architecture": "from_checkpoint"}
    },
    "my.yaml: train.finetune: missing, but model.checkpoint is set; add true (load": {
        "model": {"checkpoint": "."}
    },
    "my.yaml: model.checkpoint: none/a: no such folder; give the folder of a checkpoint": {
        "model": {"checkpoint": "none/a"}
    },
    "my.yaml: train.load_optimizer: false: only a run with train.finetune false loads": {
        "train": {"load_optimizer": False}
    },
    "my.yaml: train.finetune: false: there is no model.checkpoint; set it, or remove": {
        "train": {"finetune": False}
    },
}


@pytest.mark.parametrize("expected", MISTAKES)
def test_mistakes_are_one_line_each(expected: str) -> None:
    message = error_of(MISTAKES[expected])
    assert message.startswith(expected)
    assert "\n" not in message


def test_all_mistakes_are_reported_at_once() -> None:
    assert len(error_of({"a": 1, "b": 2, "seed": "x"}).splitlines()) == 3


def test_the_architecture_is_from_the_checkpoint_unless_a_file_is_named() -> None:
    for model, expected in (
        ({}, (Path("config/models/tiny-llama.yaml"),) * 2),
        ({"checkpoint": "a"}, ("from_checkpoint", None)),
        ({"checkpoint": "a", "architecture": None}, ("from_checkpoint", None)),
        ({"checkpoint": "a", "architecture": "b.yaml"}, (Path("b.yaml"),) * 2),
    ):
        settings = ModelSettings.model_validate(model)
        assert (settings.architecture, settings.stated) == expected


def test_a_split_in_braces_without_quotes_is_explained() -> None:
    lines = error_of(yaml.safe_load("{model: {architecture: a.yaml}, train: {split: 98,1,1}}"))
    assert lines.splitlines() == [
        "my.yaml: train.split: 98: give two or three non-negative numbers, train,valid,test, as in "
        '"98,2" or "949,50,1"',
        "my.yaml: train.1: a number is no key; quote text with commas in braces, as in "
        '{split: "98,1,1"}',
    ]


@pytest.mark.parametrize("text", ['"95,4.5,0.5"', "[95, 4.5, 0.5]", "['95', 4.5, 0.5]"])
def test_a_split_is_text_or_a_list(text: str) -> None:
    value = yaml.safe_load(f"{{model: {{architecture: a.yaml}}, train: {{split: {text}}}}}")
    assert validate(Config, value, "my.yaml").train.split == "95,4.5,0.5"


def test_the_default_files_are_valid() -> None:
    value = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    checked = validate(Config, value, "config.yaml")
    assert set(value) == set(Config.model_fields)
    assert [c.corpus for c in read_corpora(ROOT / checked.corpora)] == ["code", "docs"]
    for path in (ROOT / "config/models").glob("*.yaml"):
        read_architecture(path)


def test_schema_json_is_up_to_date() -> None:
    assert (ROOT / "config/schema.json").read_text() == schema(), (
        "run: python -m tokamake.config.root > config/schema.json"
    )


def test_every_field_is_documented() -> None:
    sections = [
        import_module(f"tokamake.config.{path.stem}")
        for path in Path(tokamake.config.__file__).parent.glob("*.py")
    ]
    classes = {cls for section in sections for _, cls in getmembers(section, isclass)} | {Corpus}
    models = [cls for cls in classes if issubclass(cls, Settings)]
    missing = [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert len(models) > 10
    assert not missing


def test_missing_and_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: no such file; fix the path, or choose"):
        read_architecture(tmp_path / "none.yaml")
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"a\.yaml:1: not valid YAML"):
        read_architecture(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text(
        "{hidden_size: 10, num_attention_heads: 3, num_key_value_heads: 1, num_hidden_layers: 1,"
        " intermediate_size: 4}"
    )
    with pytest.raises(
        UserError, match="hidden_size: 10: not a multiple of num_attention_heads 3; give 9 or 12"
    ):
        read_architecture(tmp_path / "a.yaml")


def test_a_written_run_reads_back_equal(tmp_path: Path) -> None:
    run = Run(
        run="a", seed=1, checkpoint=Path("c"), index=Path("i"), data_root=Path("d"),
        output=Path("o"),
        architecture=read_architecture(ROOT / "config/models/tiny-llama.yaml"),
        train=ResolvedTrainSettings(train_steps=7),
    )  # fmt: skip
    write_run(tmp_path / "run.yaml", run)
    assert read_run(tmp_path / "run.yaml") == run


# Tokens whose tokenizer is not at hand, and lists of existing datasets


def config_of(**sections: object) -> Config:
    return validate(Config, {"model": {"architecture": "a.yaml"}, **sections}, "my.yaml")


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        ({"tokenizer": {"vocab_size": 299}}, "vocab_size: 299: give at least 300 for kind bpe"),
        ({"tokenizer": {"eod": 2}}, "eod: 2: no effect on kind bpe; remove it"),
        ({"tokenizer": {"kind": "ids", "vocab_size": 9, "eod": 9}}, "eod: 9: not in the vocab"),
        ({"tokenizer": {"kind": "ids"}}, "vocab_size: missing; kind ids needs the number of"),
        (
            {"tokenizer": {"kind": "ids", "vocab_size": 9, "special_tokens": ["a"]}},
            "special_tokens: no effect on kind ids",
        ),
        (
            {"tokenizer": {"kind": "ids", "vocab_size": 9}, "generate": {"prompts": ["8 9"]}},
            "generate.prompts: '8 9': tokenizer.kind is ids, but '9' is no token id below 9;",
        ),
        ({"corpora": None}, "corpora: null: no data; name a table of corpora, or set weights"),
        ({"data_root": "x"}, "data_root: x: no effect without weights; set weights"),
    ],
)
def test_mistakes_about_ids_and_lists(sections: dict[str, object], fault: str) -> None:
    with pytest.raises(UserError) as caught:
        config_of(**sections)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_of_token_ids_continues_the_end_of_a_document() -> None:
    assert config_of(tokenizer={"kind": "ids", "vocab_size": 9}).prompts == ("8",)
    assert config_of(tokenizer={"kind": "ids", "vocab_size": 9, "eod": 0}).prompts == ("0",)
    named = {"tokenizer": {"kind": "ids", "vocab_size": 9}, "generate": {"prompts": ["1 2"]}}
    assert config_of(**named).prompts == ("1 2",)


def test_a_list_replaces_the_default_table_only() -> None:
    assert config_of().corpus_table == Path("config/corpora.tsv")
    assert config_of(weights="mix.txt").corpus_table is None
    assert config_of(weights="mix.txt", corpora="my.tsv").corpus_table == Path("my.tsv")


def test_the_page_of_the_config_names_every_key() -> None:
    page = (ROOT / "config/README.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {key.strip(" `") for row in rows for key in row.split(",")}
    assert {*Config.model_fields} <= named
