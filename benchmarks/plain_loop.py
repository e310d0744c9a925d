"""The upper bound of the speed: a plain loop of orjson and gigatoken without any checks.

    python benchmarks/plain_loop.py INPUT PREFIX TOKENIZER

It writes no sources and no hashes, does not sync to disk, and stops with a traceback.
"""

import struct
import sys
from pathlib import Path

import awkward as ak
import gigatoken as gt
import numpy as np
import orjson

_BLOCK = 32 << 20


def main() -> None:
    """Tokenize a jsonl file; every document gets an end-of-document token."""
    source, prefix, path = map(Path, sys.argv[1:])
    tokenizer, eod, dtype = load(path)
    lengths = []
    with source.open("rb") as stream, Path(f"{prefix}.bin").open("wb") as target:
        while lines := stream.readlines(_BLOCK):
            encoded = tokenizer.encode_batch([orjson.loads(line)["text"] for line in lines])
            flat, counts = ak.to_numpy(ak.flatten(encoded)), ak.to_numpy(ak.num(encoded))
            tokens: np.ndarray = np.empty(len(flat) + len(counts), dtype)
            is_eod = np.zeros(len(tokens), bool)
            is_eod[np.cumsum(counts + 1) - 1] = True
            tokens[is_eod], tokens[~is_eod] = eod, flat
            tokens.tofile(target)
            lengths.append(counts + 1)
    write_index(Path(f"{prefix}.idx"), np.concatenate(lengths).astype("<i4"), dtype)


def load(path: Path) -> tuple[gt.Tokenizer, int, type]:
    """Load a GPT-2 folder or a SentencePiece model: gigatoken's tokenizer, EOD token, dtype."""
    if (path / "merges.txt").is_file():
        from tokenizers import Tokenizer, models, pre_tokenizers

        model = models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt"))
        slow = Tokenizer(model)
        slow.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        slow.add_special_tokens(["<|endoftext|>"])
        return gt.Tokenizer(slow), slow.token_to_id("<|endoftext|>"), np.uint16
    from sentencepiece import SentencePieceProcessor

    model_path = str(path if path.is_file() else next(path.glob("*.model")))
    processor = SentencePieceProcessor(model_file=model_path)
    return gt.Tokenizer.from_sentencepiece(model_path), processor.eos_id(), np.uint16


def write_index(path: Path, lengths: np.ndarray, dtype: type) -> None:
    """Write Megatron's .idx file; each document is one sequence."""
    pointers = np.zeros(len(lengths), "<i8")
    pointers[1:] = np.cumsum(lengths[:-1], dtype=np.int64) * np.dtype(dtype).itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    path.write_bytes(header + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())


if __name__ == "__main__":
    main()
