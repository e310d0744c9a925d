"""The parser of SentencePiece models agrees with their own package."""

import io

import pytest
import sentencepiece

from tokamake.data.tokenizers import _sentencepiece_model as sentencepiece_model

CONTROLS = ["<" + "c" * length + ">" for length in (3, 60, *range(100, 140), 300)]
"""Message lengths below and above 128, where a length starts to take two bytes."""


@pytest.fixture(scope="module")
def model() -> bytes:
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(f"word {number} of a text" for number in range(300)),
        model_writer=content,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        control_symbols=",".join(CONTROLS),
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return content.getvalue()


def test_pieces_match_the_package(model: bytes) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    spec = sentencepiece_model.read(model)
    assert len(spec.pieces) == processor.get_piece_size()
    for number, piece in enumerate(spec.pieces):
        assert piece.text == processor.id_to_piece(number)
        assert piece.score == processor.get_score(number)
        assert (piece.kind == 2) == processor.is_unknown(number)
        assert (piece.kind == 3) == processor.is_control(number)
        assert (piece.kind == 6) == processor.is_byte(number)
    assert {piece.text for piece in spec.pieces if piece.kind == 3} >= set(CONTROLS)
    assert (spec.kind, spec.byte_fallback, spec.escapes_spaces) == ("bpe", True, True)


@pytest.mark.parametrize(
    "content", [b"no model", b"\x0a", b"\x0a\x02\x10\x80", b"\x0a\x03\x0a\x01\xff"]
)
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"SentencePiece|utf-8"):
        sentencepiece_model.read(content)
