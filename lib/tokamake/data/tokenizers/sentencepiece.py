"""SentencePiece models, as Llama-2's: documents end with the model's own </s>, none gets a <s>."""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError


def files(path: Path) -> list[Path]:
    """The .model file, which must be the only one of a folder."""
    if path.is_file():
        return [path] if path.suffix == ".model" else []
    found = sorted(path.glob("*.model"))
    if len(found) > 1:
        raise UserError(f"tokenizer {path}: holds {len(found)} .model files; name one of them")
    return found


def load(found: list[Path]) -> Tokenizer:
    """Load a SentencePiece model; its eos piece ends documents."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(found[0]))
    if processor.eos_id() < 0:
        raise UserError(f"tokenizer {found[0]}: the model has no eos piece to end documents with")

    def encode_batch(texts: list[str], /, *, workers: int = 1) -> list[list[int]]:
        return list(processor.encode(texts, num_threads=workers))

    return Tokenizer(
        vocab_size=processor.get_piece_size(),
        eod=processor.eos_id(),
        bos=processor.bos_id() if processor.bos_id() >= 0 else None,
        encode_batch=encode_batch,
        decode=lambda ids: processor.decode(ids),
        package="sentencepiece",
        definition=found[0].read_bytes,
    )
