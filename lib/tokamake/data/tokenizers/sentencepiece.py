"""SentencePiece models (e.g. Llama-2's). Documents end with the model's eos piece, without bos.

If tokenizer_config.json beside a BPE model has the class LlamaTokenizer, texts are encoded as
transformers does, also with added tokens. The package sentencepiece encodes for all other models.
"""

from pathlib import Path
from typing import Any

from tokamake.data.tokenizers import (
    Tokenizer,
    refuse_several,
    settings,
    special_token,
    with_configs,
)
from tokamake.data.tokenizers import _sentencepiece_model as sentencepiece_model
from tokamake.data.tokenizers._fast import stated_texts, wrap
from tokamake.data.tokenizers._sentencepiece_model import CONTROL, USER_DEFINED
from tokamake.errors import UserError


def files(path: Path) -> list[Path]:
    """Return the .model file and the config files beside it; a folder must have only one model."""
    paths = [path] if path.is_file() else sorted(path.glob("*.model"))
    paths = [file for file in paths if file.suffix == ".model"]
    refuse_several(path, paths)
    return with_configs(paths)


def load(paths: list[Path]) -> Tokenizer:
    """Load a SentencePiece model."""
    import sentencepiece

    config = settings(paths)
    if str(config.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer":
        return _as_llama(paths, config)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(paths[0]))
    ids = {processor.id_to_piece(token): token for token in range(processor.get_piece_size())}
    if missing := [text for text in stated_texts(paths) if text not in ids]:
        raise UserError(
            f'tokenizer {paths[0]}: the files beside it add the token "{missing[0]}", which is '
            "supported with tokenizer_class LlamaTokenizer only; load the folder with AutoTokenizer"
            " and save it: that writes a tokenizer.json"
        )
    eod = ids.get(special_token(config, "eos_token"), processor.eos_id())
    bos = ids.get(special_token(config, "bos_token"), processor.bos_id())
    if eod < 0:
        raise UserError(f"tokenizer {paths[0]}: the model has no eos piece to end documents with")

    def encode_batch(texts: list[str], /, *, workers: int = 1) -> list[list[int]]:
        return list(processor.encode(texts, num_threads=workers))

    return Tokenizer(
        vocab_size=len(ids),
        eod=eod,
        bos=bos if bos >= 0 else None,
        adds_bos=config.get("add_bos_token") is not False,
        encode_batch=encode_batch,
        decode=lambda ids: processor.decode(ids),
        package="sentencepiece",
        definition=paths[0].read_bytes,
    )


def _as_llama(paths: list[Path], config: dict[str, Any]) -> Tokenizer:
    """Build the LlamaTokenizer of transformers 5 from a BPE model."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    spec = sentencepiece_model.read(paths[0].read_bytes())
    if spec.kind != "bpe":
        raise UserError(
            f"tokenizer {paths[0]}: a {spec.kind} model, but tokenizer_class LlamaTokenizer beside "
            "it needs a bpe model; fetch all of its files again"
        )
    ids = {piece.text: token for token, piece in enumerate(spec.pieces)}
    cuts = ((text[:cut], text[cut:]) for text in ids for cut in range(1, len(text)))
    merges = [(left, right) for left, right in cuts if left in ids and right in ids]
    fast = Fast(models.BPE(ids, merges, fuse_unk=True, byte_fallback=True))
    has_prefix = config.get("add_prefix_space") is not False
    scheme = "always" if config.get("legacy") else "first"
    fast.pre_tokenizer = pre_tokenizers.Metaspace(
        "▁", prepend_scheme=scheme if has_prefix else "never", split=False
    )
    strip = [decoders.Strip(" ", left=1)] if has_prefix else []
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    pieces = [
        AddedToken(piece.text, normalized=False, special=piece.kind == CONTROL)
        for piece in spec.pieces
        if piece.kind in (CONTROL, USER_DEFINED)
    ]
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return wrap(fast, paths, defaults=defaults, pieces=pieces)
