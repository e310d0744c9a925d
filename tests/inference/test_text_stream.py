"""Text that comes token by token is the text of all tokens, up to a stop string."""

from pathlib import Path

import pytest

from tokamake.data.tokenizers import open_tokenizer
from tokamake.inference.text_stream import TextStream

BYTES = [bytes([number]) for number in range(256)]


def decode(tokens: list[int]) -> str:
    """Tokens are bytes."""
    return b"".join(BYTES[token] for token in tokens).decode(errors="replace")


def streamed(text: str, stops: tuple[str, ...] = (), prompt: bytes = b"") -> tuple[list[str], str]:
    """Parts of a text as they come, and the whole."""
    stream = TextStream(decode, [*prompt], stops=stops)
    parts = []
    for token in text.encode():
        parts.append(stream.add(token))
        if stream.is_stopped:
            break
    return [*parts, stream.finish()], stream.text


@pytest.mark.parametrize("text", ["plain", "zwölf", "日本語 text", "a 🙂 b", ""])
@pytest.mark.parametrize("prompt", [b"", b"before", "ä".encode()[:1]])
def test_parts_are_whole_characters_of_the_text(text: str, prompt: bytes) -> None:
    parts, whole = streamed(text, prompt=prompt)
    assert "".join(parts) == whole
    if prompt != "ä".encode()[:1]:
        assert whole == text
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    stream = TextStream(decode, [])
    assert [stream.add(token) for token in "aä".encode()[:2]] == ["a", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.text == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one. two", (".",), "one"),
        ("one\n\ntwo", ("\n\n",), "one"),
        ("one\ntwo", ("\n\n",), "one\ntwo"),
        ("aab", ("ab",), "a"),
        ("abcabd", ("abd", "zz"), "abc"),
        ("end", ("END", "nd", "d"), "e"),
        ("a\n", ("\n\n",), "a\n"),
    ],
)
def test_text_ends_before_the_first_stop_string(
    text: str, stops: tuple[str, ...], expected: str
) -> None:
    parts, whole = streamed(text, stops)
    assert whole == "".join(parts) == expected
    # Nothing came out that had to be taken back.
    assert all(expected.startswith("".join(parts[:n])) for n in range(len(parts)))


def test_text_of_a_real_tokenizer_equals_that_of_all_tokens(sampled: Path) -> None:
    tokenizer = open_tokenizer(sampled / "tokenizer")
    text = "def main():\n    return {'größe': 12}  # 日本\n"
    (prompt,), (tokens,) = tokenizer.encode_batch(["import os\n"]), tokenizer.encode_batch([text])
    stream = TextStream(tokenizer.decode, prompt)
    parts = [stream.add(token) for token in tokens]
    parts.append(stream.finish())
    assert "".join(parts) == stream.text == text
