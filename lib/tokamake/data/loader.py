"""Samples and batches as NumPy arrays, straight from memory-mapped files.

The index folder comes from `index`, the tokens from the pairs under the data root; batches go to
the trainer. The order depends on the number of consumed samples alone, so any run can resume.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake import files
from tokamake.data.index import VERSION, array_path, identity
from tokamake.data.indexed import IndexedDataset
from tokamake.data.samples import FileIndex
from tokamake.errors import UserError

_REMEDY = "run `tokamake index` again"


def read_index(folder: Path) -> dict[str, Any]:
    """Read an index folder's index.json, as `index` describes it.

    Raises:
        UserError: it is missing, of another version or was changed since.
    """
    path = folder / "index.json"
    described = files.read_json(path, _REMEDY)
    if not isinstance(described, dict) or described.get("version") != VERSION:
        raise UserError(f"{path}: not an index of version {VERSION}; {_REMEDY}")
    rest = {key: value for key, value in described.items() if key != "digest"}
    if files.digest(rest) != described.get("digest"):
        raise UserError(f"{path}: does not match its own digest; {_REMEDY}")
    return described


class Samples:
    """All samples of one split, in training order.

    Attributes:
        sequence_length: tokens that the model sees per sample.
        digest: hash over all that determines the samples and their order.

    Args:
        folder: index folder.
        split: train or valid.
        data_root: folder that the prefixes are relative to.

    Raises:
        UserError: the index or a pair is missing or damaged, or the pair is not the indexed one.
    """

    def __init__(self, folder: Path, *, split: str, data_root: Path) -> None:
        described = read_index(folder)
        if split not in described["splits"]:
            raise UserError(f"{folder}: no {split} split; run `tokamake index` with samples for it")
        self.sequence_length: int = described["sequence_length"]
        self.digest: str = described["digest"]
        self._files = described["splits"][split]["files"]
        for prefix in (file["prefix"] for file in self._files):
            if identity(data_root, prefix) != described["pairs"][prefix]:
                raise UserError(f"{data_root / prefix}: changed since it was indexed; {_REMEDY}")
        self._datasets = [IndexedDataset(data_root / file["prefix"]) for file in self._files]
        self._indexes = [_file_index(folder / split, n) for n in range(len(self._files))]
        self._dataset_index = _open(folder / split / "dataset_index.npy")
        self._dataset_sample_index = _open(folder / split / "dataset_sample_index.npy")

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Tokens of one sample, (sequence_length + 1,), assembled across documents."""
        number = self._file(sample)
        dataset, index = self._datasets[number], self._indexes[number]
        row = int(index.shuffle[self._dataset_sample_index[sample]])
        (first, offset), (last, end) = index.sample[row : row + 2].tolist()
        parts = [dataset[document] for document in index.document[first : last + 1]]
        # The end comes first: where both lie in one document, its offset counts from the start.
        parts[-1] = parts[-1][: end + 1]
        parts[0] = parts[0][offset:]
        tokens = np.concatenate(parts, dtype=np.int64)
        assert len(tokens) == self.sequence_length + 1
        return tokens

    def source(self, sample: int) -> str:
        """Name of the corpus that a sample comes from."""
        return self._files[self._file(sample)]["corpus"]

    def _file(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        return int(self._dataset_index[sample])


def batches(
    samples: Samples,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield a rank's micro batches, (micro_batch_size, sequence_length + 1), until samples run out.

    All ranks together take contiguous blocks, each rank its rows: Megatron's sequential sampler.
    So a global batch holds the same samples however many ranks share it. Samples that do not fill
    a last block are left out.
    """
    assert 0 <= data_parallel_rank < data_parallel_size
    block = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, len(samples) - block + 1, block):
        first = start + data_parallel_rank * micro_batch_size
        yield np.stack([samples[first + row] for row in range(micro_batch_size)])


def _file_index(folder: Path, number: int) -> FileIndex:
    return FileIndex(*(_open(array_path(folder, number, name)) for name in FileIndex._fields))


def _open(path: Path) -> npt.NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {_REMEDY}") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); {_REMEDY}") from None
