"""Samples of the objective ict, the inverse cloze task (arXiv 1906.00300).

A sentence of a block is the query. The block mostly loses it, so that the model does not learn to
compare words alone. Its query depends on the seed and on its number in the dataset alone.
"""

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.index_folder import REMEDY, identity, matches
from tokamake.data.samples.sentence_samples import IndexedSentences
from tokamake.errors import UserError
from tokamake.train.objectives.ict.blocks import BlockSettings, title_of, with_special_tokens

Tokens = npt.NDArray[np.int64]


def ict_record(sequence_length: int) -> np.dtype[np.void]:
    """Fields of a sample of L tokens.

    query: (L,) [CLS] sentence [SEP], then [PAD].
    block: (L,) [CLS] title [SEP] text [SEP], or without a title [CLS] text [SEP]; then [PAD].
    num_query, num_block: tokens that are not padding.
    document: number of the document in its dataset.
    """
    arrays = [(name, np.int64, (sequence_length,)) for name in ("query", "block")]
    numbers = [(name, np.int64) for name in ("num_query", "num_block", "document")]
    return np.dtype([*arrays, *numbers])


class BlockSamples(IndexedSentences):
    """Samples of one split, as arrays without dimensions with the fields of `ict_record`."""

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        super().__init__(folder, split=split, data_root=data_root, verify=verify)
        self._blocks = BlockSettings(**self._stated)
        self._companions: list[str | None] = [each.get("companion") for each in self._descriptions]
        for titles in filter(None, self._companions if verify else []):
            pair = self._description["pairs"][titles]
            if not matches(pair, identity(data_root, titles)):
                raise UserError(f"{data_root / titles}: changed since it was indexed; {REMEDY}")
        self._data_root = data_root
        self._titles: dict[int, IndexedDataset] = {}
        self._record = ict_record(self.sequence_length)

    def __getitem__(self, sample: int) -> npt.NDArray[Any]:
        number, (first, end, document, _) = self._dataset_number(sample), self._row(sample)
        dataset, row = self._dataset(number), np.zeros((), self._record)
        try:
            sentences = [dataset[sentence] for sentence in range(first, end)]
            title = self._title(number, document)
        except (ValueError, IndexError) as error:
            raise UserError(
                f"{self.prefixes[number]}: sample {sample}: {error}: the dataset does not match "
                f"its index; {REMEDY}"
            ) from error
        query, keeps_query = self._draw(int(self._dataset_sample_index[sample]), len(sentences))
        text = sentences if keeps_query else [*sentences[:query], *sentences[query + 1 :]]
        row["num_query"] = self._write(row["query"], [sentences[query]])
        row["num_block"] = self._write(row["block"], text, title=title)
        row["document"] = document
        return row

    def _draw(self, number: int, num_sentences: int) -> tuple[int, bool]:
        """Sentence that is the query, and whether the block keeps it."""
        # Hashes, not a generator with a state: any worker or resumed run draws the same.
        digest = hashlib.blake2b(struct.pack("<qq", self._seed, number), digest_size=16).digest()
        place, share = struct.unpack("<QQ", digest)
        is_kept = share < self._blocks.query_in_block_probability * 2**64
        return place % num_sentences, is_kept or num_sentences == 1

    def _write(
        self,
        row: Tokens,
        sentences: list[npt.NDArray[Any]],
        *,
        title: npt.NDArray[Any] | None = None,
    ) -> int:
        """Write a text with its special tokens; return the tokens that are not padding."""
        text, tokens = np.concatenate(sentences), self._blocks.tokens
        framed = with_special_tokens(text, title, tokens=tokens, length=len(row))
        row[: len(framed)], row[len(framed) :] = framed, tokens["pad"]
        return len(framed)

    def _title(self, number: int, document: int) -> npt.NDArray[Any] | None:
        name = self._companions[number]
        if name is None:
            return None
        if number not in self._titles:
            self._titles[number] = IndexedDataset(self._data_root / name)
        return title_of(self._titles[number], document)[: self._blocks.max_title_tokens]
