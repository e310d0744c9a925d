"""A tokenizer is copied into a Hugging Face folder; other formats report that it is left behind."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_init_model import words
from tests.support import hf_folder, llamas
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Target
from tokamake.errors import UserError

SHAPE = llamas.ARCHITECTURES[5]
OF_MODEL = ["config.json", "generation_config.json", "model.safetensors"]
FILES = ["tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A checkpoint of tokamake's own, of a model of 131 tokens."""
    hf_folder.write(tmp_path / "start", SHAPE, random_tensors(SHAPE, 1))
    convert(source=tmp_path / "start", target=tmp_path / "native", format="native")
    shutil.rmtree(tmp_path / "start")
    return tmp_path / "native"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def end_tokens(folder: Path) -> list[Any]:
    return [json.loads((folder / name).read_text())["eos_token_id"] for name in OF_MODEL[:2]]


def test_a_tokenizer_is_copied_beside_the_weights(
    native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = words(tmp_path, 120)
    files = ["chat_template.jinja", "special_tokens_map.json", *FILES]
    (tokenizer / "notes.txt").write_text("not of the tokenizer")
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    end = json.loads((tokenizer / "tokenizer_config.json").read_text())["eos_token"]
    (tokenizer / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    card = tmp_path / "card.md"
    card.write_text("# A model\n")
    options: dict[str, Any] = {"tokenizer": tokenizer, "model_card": card}
    convert(source=native, target=tmp_path / "a", format="hf", **options)
    assert (tmp_path / "a/README.md").read_bytes() == card.read_bytes()
    (tmp_path / "a/README.md").unlink()
    assert names(tmp_path / "a") == sorted([*OF_MODEL, *files, "additional_chat_templates"])
    template = "additional_chat_templates/tool_use.jinja"
    assert (tmp_path / "a" / template).read_bytes() == (tokenizer / template).read_bytes()
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tokenizer / name).read_bytes()
    assert end_tokens(tmp_path / "a") == [119, 119]
    printed = capsys.readouterr().out
    all_files = ["tool_use.jinja", *files]
    assert f"tokenizer: {', '.join(all_files)}, from {tokenizer}\n" in printed
    assert "left behind" not in printed
    assert "no end-of-text token" not in printed
    file = tokenizer / "tokenizer.json"
    convert(source=native, target=tmp_path / "b", format="hf", tokenizer=file)
    assert names(tmp_path / "b") == names(tmp_path / "a")


def test_transformers_loads_the_tokenizer_with_the_model(tmp_path: Path, sampled: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tokamake.data.tokenizers import open_tokenizer

    opened = open_tokenizer(sampled / "tokenizer")
    shape = SHAPE.model_copy(update={"vocab_size": opened.vocab_size})
    hf_folder.write(tmp_path / "start", shape, random_tensors(shape, 1))
    convert(source=tmp_path / "start", target=tmp_path / "native", format="native")
    output = tmp_path / "export"
    convert(source=tmp_path / "native", target=output, format="hf", tokenizer=sampled / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.generation_config.eos_token_id == opened.eod
    encoded = AutoTokenizer.from_pretrained(output)("def f(x):", return_tensors="pt")
    assert encoded.input_ids[0].tolist() == opened.encode_batch(["def f(x):"])[0]
    with torch.no_grad():
        assert model(encoded.input_ids).logits.isfinite().all()


GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "pad_token_id": 3}


def test_an_export_keeps_the_generation_config_and_the_special_tokens(
    tmp_path: Path, sampled: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from tokamake.data.tokenizers import open_tokenizer

    opened = open_tokenizer(sampled / "tokenizer")
    shape = SHAPE.model_copy(update={"vocab_size": opened.vocab_size})
    hf_folder.write(tmp_path / "start", shape, random_tensors(shape, 1))
    stops = [7, opened.eod, 9]
    generation = {**GENERATION, "bos_token_id": 5, "eos_token_id": stops}
    (tmp_path / "start/generation_config.json").write_text(json.dumps(generation))
    convert(source=tmp_path / "start", target=tmp_path / "native", format="native")
    convert(
        source=tmp_path / "native",
        target=tmp_path / "export",
        format="hf",
        tokenizer=sampled / "tokenizer",
        generation_config=tmp_path / "start",
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    expected = {**GENERATION, "bos_token_id": opened.bos, "eos_token_id": stops}
    assert expected.items() <= model.generation_config.to_dict().items()
    assert (model.config.bos_token_id, model.config.eos_token_id) == (opened.bos, stops)
    # Without a tokenizer, a Hugging Face folder keeps its own.
    convert(source=tmp_path / "start", target=tmp_path / "copy", format="hf", dtype="bf16")
    kept = json.loads((tmp_path / "copy/generation_config.json").read_text())
    assert GENERATION.items() <= kept.items()


def test_stop_tokens_of_another_tokenizer_are_not_kept(tmp_path: Path, sampled: Path) -> None:
    from tokamake.data.tokenizers import open_tokenizer

    opened = open_tokenizer(sampled / "tokenizer")
    shape = SHAPE.model_copy(update={"vocab_size": opened.vocab_size})
    hf_folder.write(tmp_path / "start", shape, random_tensors(shape, 1))
    config = tmp_path / "generation_config.json"
    config.write_text(json.dumps({**GENERATION, "eos_token_id": [opened.eod + 1]}))
    convert(
        source=tmp_path / "start",
        target=tmp_path / "export",
        format="hf",
        tokenizer=sampled / "tokenizer",
        generation_config=config,
    )
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "export" / name).read_text())["eos_token_id"] == opened.eod


def test_a_generation_config_is_checked(native: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[]")
    for path, fault in (
        (tmp_path, r"generation_config\.json: not a JSON object; fetch or export"),
        (tmp_path / "none", "none: no such file"),
    ):
        with pytest.raises(UserError, match=fault):
            convert(source=native, target=tmp_path / "out", format="hf", generation_config=path)
    with pytest.raises(UserError, match="a checkpoint of format native keeps none; leave it out"):
        convert(source=native, target=tmp_path / "out", format="native", generation_config=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(native: Path, tmp_path: Path) -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(UserError, match=message) as error:
            convert(**{"source": native, "target": tmp_path / "out", "format": "hf", **options})
        assert "\n" not in str(error.value)
        assert not [name for name in names(tmp_path) if "out" in name]

    refused(
        r"words132: has 132 entries, the model of .*global_step0 has 131; give the tokenizer",
        tokenizer=words(tmp_path, 132),
    )
    refused("tokenizer .*none: no such file or folder", tokenizer=tmp_path / "none")
    for kind in ("native", "mds", "mds-pipeline", "universal", "megatron", "torch-dist"):
        message = f"words120: a checkpoint of format {kind} keeps none; leave it out, or choose hf"
        refused(message, format=kind, tokenizer=words(tmp_path, 120))
    convert(source=native, target=tmp_path / "fits", format="hf", tokenizer=words(tmp_path, 131))


def test_a_tokenizer_with_fewer_entries_than_the_model_is_reported(
    native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(source=native, target=tmp_path / "fits", format="hf", tokenizer=words(tmp_path, 131))
    assert capsys.readouterr().err == ""
    convert(source=native, target=tmp_path / "few", format="hf", tokenizer=words(tmp_path, 130))
    message = capsys.readouterr().err
    assert message.startswith(f"--tokenizer {tmp_path}/words130: has 130 entries, the model of ")
    assert message.endswith(
        "has 131; if the other rows are not padding, the model was trained with another tokenizer\n"
    )


def test_the_tokenizer_of_a_hugging_face_folder_is_copied(
    native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, tokenizer = tmp_path / "a", words(tmp_path, 120)
    convert(source=native, target=source, format="hf", tokenizer=tokenizer)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("not of the tokenizer")
    capsys.readouterr()
    convert(source=source, target=tmp_path / "b", format="hf", dtype="bf16")
    kept = ["chat_template.jinja", *FILES]
    assert f"tokenizer: {', '.join(kept)}, from {source}\n" in capsys.readouterr().out
    assert names(tmp_path / "b") == sorted(OF_MODEL + kept)
    for name in kept:
        assert (tmp_path / "b" / name).read_bytes() == (source / name).read_bytes()
    assert end_tokens(tmp_path / "b") == [119, 119]
    # Another one takes its place.
    convert(source=source, target=tmp_path / "c", format="hf", tokenizer=words(tmp_path, 100))
    assert names(tmp_path / "c") == sorted(OF_MODEL + FILES)
    assert end_tokens(tmp_path / "c") == [99, 99]
    capsys.readouterr()
    convert(source=source, target=tmp_path / "d", format="mds")
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"left behind: tokenizer ({', '.join(kept)})"
    ]


def test_an_interrupted_conversion_does_not_continue_with_another_tokenizer(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = words(tmp_path, 120).rename(tmp_path / "tokenizer")
    options: dict[str, Any] = {"source": native, "target": tmp_path / "a", "format": "hf"}
    monkeypatch.setattr(writer, "_sync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(**options, tokenizer=tokenizer)
    monkeypatch.undo()
    assert not (tmp_path / "a").exists()
    for file in words(tmp_path, 100).iterdir():
        file.rename(tokenizer / file.name)
    convert(**options, tokenizer=tokenizer)
    assert end_tokens(tmp_path / "a") == [99, 99]


def test_large_models_have_the_tokenizer_beside_their_shards(native: Path, tmp_path: Path) -> None:
    files = (*(words(tmp_path, 120) / name for name in FILES),)
    target = Target(tokenizer=files, max_shard_bytes=50_000)
    writer.write(tmp_path / "a", open_any(native), "hf", target)
    assert {*FILES, "model.safetensors.index.json"} <= {*names(tmp_path / "a")}
    assert len([*(tmp_path / "a").glob("model-*-of-*.safetensors")]) > 1
    assert open_any(tmp_path / "a").tokenizer == (*(tmp_path / "a" / name for name in FILES),)


def test_the_tokenizer_beside_a_model_is_compared_with_it(
    native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a"
    convert(source=native, target=source, format="hf", tokenizer=words(tmp_path, 130))
    capsys.readouterr()
    convert(source=source, target=tmp_path / "b", format="hf")
    assert f"tokenizer {source}: has 130 entries, the model of" in capsys.readouterr().err
    for file in words(tmp_path, 132).iterdir():
        shutil.copyfile(file, source / file.name)
    with pytest.raises(
        UserError, match=r"tokenizer .*/a: has 132 entries, the model of .* has 131"
    ):
        convert(source=source, target=tmp_path / "c", format="hf")
    assert not (tmp_path / "c").exists()
    # Another format leaves the tokenizer behind, and another tokenizer takes its place.
    convert(source=source, target=tmp_path / "c", format="native")
    convert(source=source, target=tmp_path / "d", format="hf", tokenizer=words(tmp_path, 131))
    (source / "tokenizer.json").write_text("{}")
    capsys.readouterr()
    convert(source=source, target=tmp_path / "e", format="hf")
    assert "its tokenizer is kept, but not compared with the model" in capsys.readouterr().err


def test_files_with_a_prefix_get_the_names_that_transformers_knows(
    native: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "bert-base-uncased-vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    convert(source=native, target=tmp_path / "a", format="hf", tokenizer=folder)
    assert "vocab.txt" in names(tmp_path / "a")
