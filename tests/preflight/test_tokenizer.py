"""The dry run refuses tokenizers without the tokens of a run, and models without its embeddings."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.random_tensors import random_tensors
from tests.support.runs import write_start
from tests.support.workflow_configs import make_tokenizer, read_config, train
from tests.support.workflows import ARCHITECTURE
from tokamake.checkpoint.convert import convert
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

pytestmark = pytest.mark.usefixtures("workspace_here")

FIM_TOKENS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


def refused(**config: Any) -> str:
    """The message about a config with a mistake."""
    with pytest.raises(UserError) as caught:
        read_config(is_main_process=True, **config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fim", "tokens", "missing"),
    [
        ({"rate": 0.5}, [], FIM_TOKENS),
        ({"rate": 0.5}, FIM_TOKENS[:2], FIM_TOKENS[2:]),
        ({"rate": 0.5, "split_token": "<file>"}, FIM_TOKENS, ["<file>"]),
    ],
)
def test_a_tokenizer_to_be_trained_must_have_the_tokens_of_fim(
    fim: dict[str, Any], tokens: list[str], missing: list[str]
) -> None:
    tokenizer = {"vocab_size": 500, "special_tokens": tokens}
    assert refused(train=train(fim=fim), tokenizer=tokenizer) == (
        f"my.yaml: train.fim: {', '.join(missing)}: not a token of the tokenizer that is to be "
        "trained; add it to tokenizer.special_tokens"
    )


def test_tokens_of_fim_are_needed_with_fim_only() -> None:
    settings = train(fim={"rate": 0.5})
    assert read_config(train=train(fim={"rate": 0}), is_main_process=True)
    tokenizer = {"vocab_size": 500, "special_tokens": FIM_TOKENS}
    assert read_config(train=settings, tokenizer=tokenizer, is_main_process=True)


@pytest.mark.parametrize("kind", ["given", "ids"])
def test_a_tokenizer_without_the_tokens_of_fim_is_refused(kind: str) -> None:
    if kind == "given":
        tokenizer: dict[str, Any] = {"path": make_tokenizer("tokenizer", "a")}
        problem = "train.fim.prefix: '<fim_prefix>': not a special token of tokenizer tokenizer"
    else:
        tokenizer = {"kind": "ids", "vocab_size": 10}
        problem = "train.fim.rate: 0.5: tokenizer.kind ids has no special tokens; set it to 0, or"
    settings = train(fim={"rate": 0.5})
    message = refused(train=settings, tokenizer=tokenizer, generate={"prompts": ["1"]})
    assert message.startswith(f"my.yaml: {problem}")


@pytest.mark.parametrize(
    ("tokenizer", "entries"),
    [({"kind": "ids", "vocab_size": 101}, 101), ({"sentinels": 98}, 102), ({"sentinels": 96}, 0)],
)
def test_a_new_model_has_an_embedding_for_each_entry_of_the_tokenizer(
    tokenizer: dict[str, Any], entries: int
) -> None:
    architecture = yaml.safe_dump({**ARCHITECTURE, "vocab_size": 100})
    Path("sized.yaml").write_text(architecture)
    if "kind" not in tokenizer:
        tokenizer["path"] = make_tokenizer("tokenizer", "a")
    sections: dict[str, Any] = {"model": {"architecture": "sized.yaml"}, "tokenizer": tokenizer}
    sections["generate"] = {"prompts": ["1"]}
    if not entries:
        assert read_config(**sections, is_main_process=True)
        return
    assert refused(**sections) == (
        f"my.yaml: sized.yaml: vocab_size: 100 is less than the tokenizer's {entries} entries; "
        "raise it or leave it out"
    )


def test_a_given_tokenizer_names_the_end_of_a_document() -> None:
    path = make_tokenizer("tokenizer", "a")
    Path(path, "tokenizer_config.json").write_text("{}")
    assert refused(tokenizer={"path": path}).startswith(
        "my.yaml: tokenizer.path: tokenizer/tokenizer.json: no eos_token in tokenizer_config.json"
    )


def test_settings_and_tokenizers_that_do_not_fit_a_checkpoint_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = Architecture(**{**ARCHITECTURE, "vocab_size": 2000})
    write_start(Path("start"), shape, random_tensors(shape, 5))
    convert(source=Path("start"), target=Path("hf"), format="hf")
    other, own = make_tokenizer("other", "a b"), make_tokenizer("own", "c d e")

    def notes(**tokenizer: Any) -> list[str]:
        model = {"checkpoint": "hf"}
        settings = train(finetune=True)
        assert read_config(model=model, train=settings, tokenizer=tokenizer, is_main_process=True)
        return [line for line in capsys.readouterr().err.splitlines() if "tokenizer" in line]

    (note,) = notes(path=other)
    assert "tokenizer.path: other: is it the tokenizer of model.checkpoint? it has " in note
    shutil.copytree(own, "hf", dirs_exist_ok=True)
    (note,) = notes(path=other)
    assert note.endswith("model.checkpoint? hf/tokenizer.json is another tokenizer")
    assert notes(path=own) == notes() == []
    assert notes(kind="wordpiece", vocab_size=500) == [
        "tokamake: tokenizer.kind and vocab_size: no effect: model.checkpoint has a tokenizer, "
        "hf/tokenizer.json; remove them, or name another one in tokenizer.path"
    ]
