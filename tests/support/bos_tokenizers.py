"""A tokenizer of Llama 2's kind, which begins texts with BOS."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

VOCAB_SIZE = 400


def write_bos_tokenizer(texts: Sequence[Path], folder: Path) -> Path:
    """Train a SentencePiece BPE of 400 tokens and write its files into an existing folder."""
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    fast.decoder = tokenizers.decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, show_progress=False
    )
    fast.train([str(path) for path in texts], trainer)
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
