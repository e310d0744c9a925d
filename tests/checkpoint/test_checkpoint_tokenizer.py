"""transformers gives an encoder the inputs that it has learned from, by the export's tokenizer."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from tests.support import berts, megatron_names, t5s
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.tensors.checkpoint import Target


def wordpiece(folder: Path, *special: str) -> Path:
    """A WordPiece tokenizer as `train-tokenizer` writes one, with BERT's special tokens."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *special, "a", "b", "##c"]
    numbers = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder.mkdir()
    tokenizer.add_special_tokens(texts[:-3])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{text.strip('[]').lower()}_token": text for text in texts[:5]},
        **{"bos_token": "[CLS]", "eos_token": "[SEP]"},
    }
    if special:
        config["additional_special_tokens"] = [*special]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_tokenizer_of_a_bert_gives_the_types_of_the_tokens_of_a_pair(tmp_path: Path) -> None:
    architecture, tokenizer = berts.ARCHITECTURES["bert"], wordpiece(tmp_path / "tokenizer")
    source = megatron_names.in_memory(architecture, random_tensors(architecture, 1))
    writer.write(tmp_path / "native", source, "native", Target())
    convert(source=tmp_path / "native", target=tmp_path / "hf", format="hf", tokenizer=tokenizer)
    inputs = AutoTokenizer.from_pretrained(tmp_path / "hf")("a", "b a")
    assert inputs["input_ids"] == [2, 5, 3, 6, 5, 3]
    assert inputs["token_type_ids"] == [0, 0, 0, 1, 1, 1]
    convert(source=tmp_path / "hf", target=tmp_path / "again", format="hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        again, first = (tmp_path / folder / name for folder in ("again", "hf"))
        assert again.read_bytes() == first.read_bytes()


def test_the_tokenizer_of_a_t5_begins_and_ends_as_its_decoder(tmp_path: Path) -> None:
    architecture = t5s.t5()
    tokenizer = wordpiece(tmp_path / "tokenizer", "[BOS]", "[EOS]", "<extra_id_0>")
    source = megatron_names.in_memory(architecture, random_tensors(architecture, 1))
    writer.write(tmp_path / "native", source, "native", Target())
    convert(source=tmp_path / "native", target=tmp_path / "hf", format="hf", tokenizer=tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (loaded.bos_token, loaded.eos_token) == ("[BOS]", "[EOS]")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (5, 6)
    assert "token_type_ids" not in loaded("a")
