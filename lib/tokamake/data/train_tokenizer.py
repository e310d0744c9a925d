"""Stage `train_tokenizer`: raw corpora to a byte-level BPE in a Hugging Face folder."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tokamake.files import atomic_folder, write_json

EOD_TOKEN = "<|endoftext|>"


def train_tokenizer(
    *, corpora: Path, vocab_size: int = 8192, train_bytes: int = 1_000_000_000, output: Path
) -> None:
    """Train a byte-level BPE tokenizer on the corpora.

    Args:
        corpora: table of corpora, as config/corpora.tsv.
        vocab_size: entries, the 256 bytes and the end-of-document token included.
        train_bytes: text to train on, at most, taken evenly from the beginnings of all raw files.
        output: folder for tokenizer.json and tokenizer_config.json.

    Raises:
        UserError: a raw file is missing or damaged, or the text is too little for `vocab_size`.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from tokamake.errors import UserError

    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_texts(corpora, train_bytes), trainer)
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


def _texts(corpora: Path, train_bytes: int) -> Iterator[str]:
    from tokamake.config import read_corpora
    from tokamake.data import readers
    from tokamake.data.plan import raw_files

    found = [
        (path, corpus.text_key)
        for corpus in read_corpora(corpora)
        for path in raw_files(corpus, {})
    ]
    share = train_bytes // max(1, len(found))
    return chain.from_iterable(_beginning(readers.read(Path(p), key), share) for p, key in found)


def _beginning(texts: Iterator[str], share: int) -> Iterator[str]:
    for text in texts:
        yield text
        share -= len(text.encode("utf-8", "surrogatepass"))
        if share <= 0:
            return
