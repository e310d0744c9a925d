"""Samples of the objective causal: documents, concatenated and cut."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokamake.config.objective import DEFAULT, objective_data
from tokamake.data.samples.index_folder import REMEDY, ArrayFile
from tokamake.data.samples.loader import PAD, DocumentSpan, SplitSamples, check_sentences
from tokamake.data.samples.sample_index import DatasetIndex
from tokamake.data.samples.sentence_masking import KEY
from tokamake.errors import UserError


class DocumentSamples(SplitSamples):
    """Samples of documents, concatenated and cut; see `SplitSamples`."""

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        super().__init__(folder, split=split, data_root=data_root, verify=verify)
        name = self._description.get(KEY, {}).get("name", DEFAULT)
        if objective_data(name).has_sentences:
            raise UserError(
                f"{folder}: samples of objective {name}, not {DEFAULT}; set train.objective to it, "
                "or run `tokamake index` again"
            )
        for prefix in self.prefixes if verify else []:
            check_sentences(prefix, objective=name)
        self._padded = not self._description["drop_last_partial_sequence"] and split != "train"
        arrays = ArrayFile(folder / split)
        self._indexes = [
            arrays.index(dataset["arrays"], DatasetIndex) for dataset in self._descriptions
        ]

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Tokens of a sample, (sequence_length + 1,), assembled across documents.

        If the index keeps the last partial sample of a split, `PAD` fills it.
        """
        number = self._dataset_number(sample)
        return self._assembled(number, int(self._dataset_sample_index[sample]), sample=sample)

    def _assembled(self, number: int, place: int, *, sample: int) -> npt.NDArray[np.int64]:
        """Tokens of the sample that is drawn from a dataset as number `place`, from 0.

        Args:
            sample: its number for messages.
        """
        dataset, index = self._dataset(number), self._indexes[number]
        try:
            (first, offset), (last, end) = self._bounds(index, place)
            parts = [dataset[document] for document in index.document[first : last + 1]]
            # Cut the end first: if both bounds lie in one document, `end` counts from its start.
            parts[-1] = parts[-1][: end + 1]
            parts[0] = parts[0][offset:]
        except (IndexError, ValueError) as error:
            raise self._damaged(sample, error) from None
        missing = self.sequence_length + 1 - sum(map(len, parts))
        if missing < 0 or (missing and not self._padded):
            raise UserError(
                f"{self.prefixes[number]}: sample {sample} has "
                f"{self.sequence_length + 1 - missing} tokens, not {self.sequence_length + 1}: the "
                f"dataset does not match its index; {REMEDY}"
            )
        return np.concatenate([*parts, np.full(missing, PAD)], dtype=np.int64)

    @staticmethod
    def _bounds(index: DatasetIndex, place: int) -> list[list[int]]:
        """First and last token of a sample: position in `document` and offset in the document."""
        row = int(index.shuffle[place])
        bounds: list[list[int]] = index.sample[row : row + 2].tolist()
        return bounds

    def spans(self, sample: int) -> list[DocumentSpan]:
        """Spans whose concatenated tokens are the sample."""
        number = self._dataset_number(sample)
        index = self._indexes[number]
        place = int(self._dataset_sample_index[sample])
        (first, offset), (last, end) = self._bounds(index, place)
        spans = []
        for position in range(first, last + 1):
            sequence = int(index.document[position])
            stop = end + 1 if position == last else int(self._dataset(number).lengths[sequence])
            start = offset if position == first else 0
            if start < stop:  # the order includes empty sequences
                spans.append(
                    DocumentSpan(self._descriptions[number]["prefix"], sequence, start, stop)
                )
        return spans

    def _numbers_with(self, number: int, sequence: int) -> npt.NDArray[np.int64]:
        index = self._indexes[number]
        rows: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
        firsts = index.sample[:, 0]
        for position in np.flatnonzero(index.document == sequence):
            # From the last sample that begins before the sequence to the last that begins in it.
            first = max(int(np.searchsorted(firsts, position, side="left")) - 1, 0)
            last = int(np.searchsorted(firsts, position, side="right"))
            rows.append(np.arange(first, min(last, len(firsts) - 1)))
        return np.flatnonzero(np.isin(index.shuffle, np.concatenate(rows)))
