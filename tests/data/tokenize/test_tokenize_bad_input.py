"""With bad input, `tokenize` never hangs, raises a traceback or loses documents silently."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import torch_python
from tests.support.readings import PACK
from tests.support.tokenized import tokenized
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError

GOOD = b"".join(json.dumps({"text": f"document {n}"}).encode() + b"\n" for n in range(50))
ONE = b'{"text": "one"}\n'
TWO = b'{"text": "two"}\n'
LONG = json.dumps({"text": "word " * 10_000_000}).encode()
WORD = json.dumps({"text": "x" * 5_000_000}).encode()

# Content; then the numbers of documents written, quarantined and empty, or the error.
CASES: dict[str, tuple[bytes, tuple[int, int, int] | str]] = {
    "invalid JSON": (ONE + b"{'text': 'b'}\n" + TWO, (2, 1, 0)),
    "cut-off JSON": (ONE + b'{"text": "b', (1, 1, 0)),
    "missing key": (ONE + b'{"body": "b"}\n' + TWO, (2, 1, 0)),
    "number for text": (ONE + b'{"text": 5}\n', (1, 1, 0)),
    "null for text": (ONE + b'{"text": null}\n', (1, 1, 0)),
    "list for text": (ONE + b'{"text": ["b"]}\n', (1, 1, 0)),
    "no object": (ONE + b'"text"\n7\nnull\n' + TWO, (2, 3, 0)),
    "invalid UTF-8": (ONE + b'{"text": "\xff\xc3"}\n' + TWO, (2, 1, 0)),
    "UTF-16": (GOOD.decode().encode("utf-16"), "UTF-16"),
    "UTF-16 without BOM": (GOOD.decode().encode("utf-16-le"), "UTF-16"),
    "BOM": (b"\xef\xbb\xbf" + ONE + TWO, (2, 0, 0)),
    "lone surrogate": (ONE + b'{"text": "\\udc00"}\n' + TWO, (2, 1, 0)),
    "surrogate pair": (b'{"text": "\\ud83d\\ude00"}\n', (1, 0, 0)),
    "escaped NUL": (b'{"text": "a\\u0000b"}\n', (1, 0, 0)),
    "raw NUL": (ONE + b'{"text": "a\0b"}\n', (1, 1, 0)),
    "CRLF": (ONE.replace(b"\n", b"\r\n") + TWO.replace(b"\n", b"\r\n"), (2, 0, 0)),
    "lone CR": (ONE.replace(b"\n", b"\r") + TWO.replace(b"\n", b"\r"), "lone CR as line end"),
    "raw control character": (ONE + b'{"text": "a\x0bb"}\n', (1, 1, 0)),
    "line separators": ('{"text": "a\u2028b\u2029c\x85d"}\n'.encode(), (1, 0, 0)),
    "escaped line separators": (b'{"text": "a\\u2028b\\u0085c\\u000bd"}\n', (1, 0, 0)),
    "blank lines": (b"\n" + ONE + b"\n  \n\r\n" + TWO + b"\n\n", (2, 0, 0)),
    "no final newline": (ONE + TWO[:-1], (2, 0, 0)),
    "empty text": (ONE + b'{"text": ""}\n', (1, 0, 1)),
    "a line of 50 MB": (ONE + LONG + b"\n" + TWO, (3, 0, 0)),
    "a word of 5 MB": (ONE + WORD + b"\n", (2, 0, 0)),
    "deep nesting": (ONE + b'{"text": ' + b"[" * 100_000 + b"\n" + TWO, (2, 1, 0)),
    "deep nesting, closed": (
        ONE + b'{"text": "a", "b": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", (1, 1, 0)
    ),
    "empty file": (b"", (0, 0, 0)),
    "only blank lines": (b"\n\n\n", (0, 0, 0)),
    "array": (b"[" + ONE + b"," + TWO + b",3]", (2, 1, 0)),
    "cut array": (b"[" + ONE + b"," + TWO, "some.jsonl:3: not valid JSON"),
    "picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)), "no known format"),
}  # fmt: skip


def run(workspace: Path, path: Path, policy: str) -> dict[str, int]:
    tokenized(
        workspace, path, name="out/pair", on_bad_document=policy, max_bad_fraction=1, workers=2
    )
    return read_manifest(workspace / "out/pair")


def counts(manifest: dict[str, int]) -> tuple[int, ...]:
    return tuple(manifest[key] for key in ("documents", "quarantined_documents", "empty_documents"))


@pytest.mark.parametrize("name", CASES)
def test_every_document_is_counted_or_the_error_names_the_file(workspace: Path, name: str) -> None:
    content, expected = CASES[name]
    path = workspace / "some.jsonl"
    path.write_bytes(content)
    if isinstance(expected, str):
        for policy in ("stop", "quarantine"):
            with pytest.raises(UserError, match=expected) as raised:
                run(workspace, path, policy)
            assert "some.jsonl" in str(raised.value)
    else:
        manifest = run(workspace, path, "quarantine")
        assert counts(manifest) == expected
        assert manifest["documents_in"] == sum(expected)
        quarantine = workspace / "out/pair.quarantine.jsonl"
        assert quarantine.exists() == bool(expected[1])
        if quarantine.exists():
            assert len(quarantine.read_text().splitlines()) == expected[1]
        (workspace / "out/pair.json").unlink()
        if expected[1]:
            with pytest.raises(UserError, match=r"some\.jsonl(:\d+|: row \d+): .*; "):
                run(workspace, path, "stop")
            assert not (workspace / "out/pair.json").exists()
        else:
            assert counts(run(workspace, path, "stop")) == expected


# test_compression.py damages each kind of compression in each way.
@pytest.mark.parametrize("policy", ["stop", "quarantine"])
@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        *(("gz", "cut off"), ("zst", "corrupt")),
        *(("xz", "garbage at its end"), ("bz2", "cut to its head")),
    ],
)
def test_damaged_compressed_files_are_user_errors(
    workspace: Path, suffix: str, policy: str, damage: str
) -> None:
    compressed = PACK[suffix](GOOD * 40)
    middle = len(compressed) // 2
    damaged = {
        "cut off": compressed[:-5],
        "corrupt": compressed[:middle] + b"\0\xff\0\xff" + compressed[middle + 4 :],
        "garbage at its end": compressed + b"garbage",
        "cut to its head": compressed[:8],
    }[damage]
    path = workspace / f"some.jsonl.{suffix}"
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=rf"some\.jsonl\.{suffix}"):
        run(workspace, path, policy)
    assert not list((workspace / "out").iterdir())
    path.write_bytes(compressed + compressed)  # several members form one file
    assert counts(run(workspace, path, policy)) == (4000, 0, 0)


MISTAKES = {
    "no file": (["none.jsonl"], "none.jsonl"),
    "bad line": (["bad.jsonl"], "bad.jsonl:2: not valid JSON"),
    "no tokenizer": (["good.jsonl", "--tokenizer", "nowhere"], "tokenizer nowhere: no such file"),
    "no directory to write to": (["good.jsonl", "--output", "good.jsonl/pair"], "good.jsonl"),
    "odd range": (["good.jsonl", "--byte-range", "7"], "--byte-range 7: give START:END"),
    "odd template": (["good.jsonl", "--template", "{0}"], "template"),
    "unknown format": (["good.jsonl", "--format", "csv"], "csv"),
    "unknown policy": (["good.jsonl", "--on-bad-document", "ignore"], "ignore"),
    "unknown language": (["good.jsonl", "--language", "English"], "ISO 639"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_is_one_line(workspace: Path, name: str) -> None:
    arguments, expected = MISTAKES[name]
    (workspace / "good.jsonl").write_bytes(GOOD)
    (workspace / "bad.jsonl").write_bytes(ONE + b"bad\n")
    defaults = {"--tokenizer": "tokenizer", "--output": "out/pair"}
    for option, value in defaults.items():
        if option not in arguments:
            arguments = [*arguments, option, value]
    process = subprocess.run(
        [torch_python(), "-m", "tokamake", "tokenize", *arguments],
        cwd=workspace, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode in (1, 2)
    assert len(process.stderr.splitlines()) == 1, process.stderr
    assert expected in process.stderr
    assert not (workspace / "out").exists() or not list((workspace / "out").iterdir())


def test_an_expression_that_never_ends_is_reported_with_the_line(
    sampled: Path, tmp_path: Path
) -> None:
    """Rust panics after so many steps of an expression."""
    definition = json.loads((sampled / "tokenizer/tokenizer.json").read_text())
    pattern = {"Regex": "(a+)+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    pre_tokenizers = [split, definition["pre_tokenizer"]]
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizers}
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    raw = tmp_path / "some.jsonl"
    raw.write_bytes(ONE + TWO + json.dumps({"text": "a" * 40 + "b"}).encode() + b"\n" + ONE)
    with pytest.raises(UserError, match=r"some.jsonl:3.*tokenizer\.json: cannot encode") as error:
        tokenize((str(raw),), output=tmp_path / "out", tokenizer=folder)
    assert "retry-limit" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.bin").exists()
