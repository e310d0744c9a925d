"""Verify the checksums in a checkpoint's files: the zip archives of torch.save have CRC-32s."""

import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tokamake.checkpoint.detect import load_format
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.pickle_reader import View
from tokamake.errors import UserError


def check_checksums(
    checkpoint: Checkpoint, *, workers: int, rank: int = 0, world_size: int = 1
) -> None:
    """Read all files of a checkpoint, and compare the data with the checksums in them.

    Safetensors have no checksums, nor have files of torch before 1.6.
    """
    files = sorted({extent.file for extent in checkpoint.source.extents})
    archives = load_format(checkpoint.format).archives(files)
    own = files[rank::world_size]
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda file: _check(file, archives.get(file, [])), own):
            pass


def _check(file: Path, archives: Iterable[tuple[int, int]]) -> None:
    with file.open("rb") as stream:
        for start, length in archives:
            view = View(stream, start, length=length)
            if not zipfile.is_zipfile(view):
                continue
            try:
                with zipfile.ZipFile(view) as archive:
                    compute = partial(_compute, stream.fileno(), start)
                    torch_archive.check_checksums(archive, view, compute=compute)
            except ValueError as error:
                raise UserError(
                    f"{file}: damaged: {error}; fetch or write the checkpoint again"
                ) from None


def _compute(descriptor: int, archive_start: int, start: int, size: int) -> int:
    return torch_archive.checksum(descriptor, archive_start + start, size)
