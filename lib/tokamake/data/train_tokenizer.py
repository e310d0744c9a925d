"""Stage `train_tokenizer`: raw corpora to a byte-level BPE in a Hugging Face folder."""

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tokamake.errors import UserError
from tokamake.files import atomic_folder, write_json

EOD_TOKEN = "<|endoftext|>"


def train_tokenizer(
    files: list[Path],
    /,
    *,
    text_keys: tuple[str, ...] = ("text",),
    vocab_size: int = 8192,
    train_bytes: int = 1_000_000_000,
    output: Path,
) -> None:
    """Train a byte-level BPE tokenizer on raw files.

    Args:
        files: jsonl (plain, gz, zst, xz, bz2) or parquet files.
        text_keys: key or column that holds the text: one for all files, or one for each.
        vocab_size: entries, the 256 bytes and the end-of-document token included.
        train_bytes: text to train on, at most, taken evenly from the beginnings of all files.
        output: folder for tokenizer.json and tokenizer_config.json.

    Raises:
        UserError: a raw file is missing or damaged, or the text is too little for `vocab_size`.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size <= 256:
        raise UserError(f"--vocab-size: {vocab_size}: at least 257, the bytes and the end token")
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    trained.train_from_iterator(_texts(files, text_keys, train_bytes), trainer)
    if trained.get_vocab_size() < vocab_size:
        raise UserError(
            f"tokenizer.vocab_size: {vocab_size}: the corpora give only "
            f"{trained.get_vocab_size()} entries; lower it or add text"
        )
    with atomic_folder(output) as folder:
        trained.save(str(folder / "tokenizer.json"))
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": EOD_TOKEN,
                "eos_token": EOD_TOKEN,
            },
        )
    print(f"{output}: byte-level BPE, {vocab_size:,} entries")


def _texts(files: list[Path], text_keys: tuple[str, ...], train_bytes: int) -> Iterator[str]:
    from tokamake.data import readers

    keys = text_keys * len(files) if len(text_keys) == 1 else text_keys
    if len(keys) != len(files):
        raise UserError(
            f"--text-keys: {len(keys)} keys for {len(files)} files; give one, or one each"
        )
    share = train_bytes // len(files)
    each = (
        _beginning(readers.read(file, key), share) for file, key in zip(files, keys, strict=True)
    )
    return chain.from_iterable(each)


def _beginning(texts: Iterator[str], share: int) -> Iterator[str]:
    for text in texts:
        yield text
        share -= len(text.encode("utf-8", "surrogatepass"))
        if share <= 0:
            return
