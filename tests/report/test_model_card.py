"""The model card of a made-up run: fields of the Hub, data, training, use."""

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from huggingface_hub import ModelCard

from tests.support.finished_run import make_inputs
from tokamake.commands import COMMANDS
from tokamake.config.architecture_files import read_architecture
from tokamake.config.resolved_run import read_run
from tokamake.config.root import Config
from tokamake.config.training import TrainSettings
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.files import to_sealed_json
from tokamake.report.model_card import _front_matter, _use, model_card


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    names = ("config", "train", "metadata", "index")
    return {name: path for name, path in make_inputs(tmp_path).items() if name in names}


def card(inputs: dict[str, Path], output: Path, **options: object) -> ModelCard:
    model_card(**inputs, output=output, **options)  # type: ignore[arg-type]
    return ModelCard(output.read_text())


def test_the_hub_reads_its_fields(inputs: dict[str, Path], tmp_path: Path) -> None:
    files = (
        "code=hf://datasets/bigcode/the-stack/data/python/*.parquet raw/x.jsonl",
        "docs=hf://datasets/org/docs@v2 hf://datasets/bigcode/the-stack/data/c/*.parquet",
    )
    options = {"files": files, "base_model": "meta-llama/Llama-3.1-8B", "license": "apache-2.0"}
    data = card(inputs, tmp_path / "card.md", **options).data
    assert data.datasets == ["bigcode/the-stack", "org/docs"]
    assert (data.license, data.base_model) == ("apache-2.0", "meta-llama/Llama-3.1-8B")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")


def test_it_says_what_is_known_and_nothing_else(inputs: dict[str, Path], tmp_path: Path) -> None:
    written = card(inputs, tmp_path / "card.md", files=("code=raw/a|b/*.jsonl",))
    assert not {"license", "base_model", "datasets"} & set(written.data.to_dict())
    text = written.text
    for part in (
        "# trial",
        "| code | `raw/a\\|b/*.jsonl` | ",
        "| trained | 12,800 tokens in 50 steps |",
        "| training loss | 3.1234 nats per token at the last logged step",
        "| validation loss | 3.2500 nats per token |",
        "tokamake 9.9.9, torch 2.0",
        "AutoModelForCausalLM.from_pretrained",
        ".venv/bin/snakemake --profile PROFILE --configfile trial.yaml -- train\n",
    ):
        assert part in text, part
    assert "Training started from" not in text


def files_of(text: str) -> dict[str, Any]:
    """The YAML files that a card states, by name."""
    pattern = r"`([\w-]+\.yaml)`:\n\n```yaml\n(.*?)```"
    return {name: yaml.safe_load(block) for name, block in re.findall(pattern, text, re.DOTALL)}


def test_the_recall_of_a_retriever_is_stated(inputs: dict[str, Path], tmp_path: Path) -> None:
    for folder, share in (("model", 0.25), ("bm25", 0.5)):
        (tmp_path / folder).mkdir()
        results = {"num_questions": 3610, "recall": {"1": share, "20": 2 * share}}
        (tmp_path / folder / "nq.json").write_text(to_sealed_json(results))
    recall, bm25 = ((tmp_path / folder / "nq.json",) for folder in ("model", "bm25"))
    text = card(inputs, tmp_path / "card.md", recall=recall, bm25=bm25).text
    assert "| questions | search by | recall@1 | recall@20 |" in text
    assert "| nq (3,610) | this model | 25.0% | 50.0% |" in text
    assert "| nq (3,610) | BM25 | 50.0% | 100.0% |" in text


def test_its_files_train_the_model_again(inputs: dict[str, Path], tmp_path: Path) -> None:
    stated = files_of(card(inputs, tmp_path / "card.md").text)
    run = read_run(inputs["config"])
    for name, settings in stated.items():
        (tmp_path / name).write_text(yaml.safe_dump(settings))
    assert read_architecture(tmp_path / "trial-model.yaml") == run.architecture
    config = validate(Config, stated["trial.yaml"], str(tmp_path / "trial.yaml"))
    assert (config.run, config.seed) == ("trial", run.seed)
    assert config.model.stated == Path("trial-model.yaml")
    assert config.train.model_dump() == TrainSettings(**run.train.model_dump()).model_dump()

    settings = yaml.safe_load(inputs["config"].read_text())
    settings["train"]["finetune"] = True
    (tmp_path / "finetuned.yaml").write_text(yaml.safe_dump(settings))
    text = card({**inputs, "config": tmp_path / "finetuned.yaml"}, tmp_path / "c.md").text
    assert files_of(text)["trial.yaml"]["model"] == {"checkpoint": "CHECKPOINT"}
    assert "the checkpoint that training started from in place of CHECKPOINT" in text

    continued = files_of(card(inputs, tmp_path / "b.md", base_model="org/base").text)
    assert [*continued] == ["trial.yaml"]
    assert continued["trial.yaml"]["model"] == {"checkpoint": "hf://org/base"}


def test_the_same_inputs_give_the_same_bytes(inputs: dict[str, Path], tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("a.md", "b.md"))
    card(inputs, first)
    card(inputs, second)
    assert first.read_bytes() == second.read_bytes()


def test_a_missing_file_is_named(inputs: dict[str, Path], tmp_path: Path) -> None:
    inputs["train"].unlink()
    with pytest.raises(UserError, match=r"train: no such file; make it with `tokamake train`"):
        card(inputs, tmp_path / "card.md")
    assert not (tmp_path / "card.md").exists()


@pytest.mark.parametrize(
    ("stacks", "name"),
    [
        ("decoder", "AutoModelForCausalLM"),
        ("encoder", "AutoModelForMaskedLM"),
        ("encoder_decoder", "AutoModelForSeq2SeqLM"),
    ],
)
def test_each_kind_of_model_has_its_class_of_transformers(stacks: str, name: str) -> None:
    text = _use(stacks)
    compile(text.split("```python\n")[1].split("```")[0], "card", "exec")
    assert f"{name}.from_pretrained" in text
    assert hasattr(transformers, name)


def test_a_retriever_is_used_by_tokamake() -> None:
    commands = re.findall(r"^tokamake ([\w-]+) ", _use("biencoder"), re.M)
    assert commands == ["embed-passages", "embed-questions", "search"]
    assert {*commands} <= COMMANDS.keys()
    fields = yaml.safe_load(
        _front_matter({}, "biencoder", base_model=None, license=None).strip("-\n")
    )
    assert (fields["library_name"], fields["pipeline_tag"]) == ("tokamake", "sentence-similarity")
