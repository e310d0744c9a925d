"""SentencePiece models (e.g. Llama-2's). Documents end with the model's eos piece, without bos."""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, setting
from tokamake.errors import UserError


def files(path: Path) -> list[Path]:
    """Return the .model file; a folder must have only one."""
    if path.is_file():
        return [path] if path.suffix == ".model" else []
    paths = sorted(path.glob("*.model"))
    if len(paths) > 1:
        raise UserError(f"tokenizer {path}: holds {len(paths)} .model files; name one of them")
    return paths


def load(paths: list[Path]) -> Tokenizer:
    """Load a SentencePiece model."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(paths[0]))
    if processor.eos_id() < 0:
        raise UserError(f"tokenizer {paths[0]}: the model has no eos piece to end documents with")

    def encode_batch(texts: list[str], /, *, workers: int = 1) -> list[list[int]]:
        return list(processor.encode(texts, num_threads=workers))

    return Tokenizer(
        vocab_size=processor.get_piece_size(),
        eod=processor.eos_id(),
        bos=processor.bos_id() if processor.bos_id() >= 0 else None,
        adds_bos=setting(paths, "add_bos_token") is not False,  # the default of transformers
        encode_batch=encode_batch,
        decode=lambda ids: processor.decode(ids),
        package="sentencepiece",
        definition=paths[0].read_bytes,
    )
