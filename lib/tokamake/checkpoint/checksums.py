"""Checksums that are in a checkpoint's files already: torch's zip archives have CRC-32s."""

import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokamake.checkpoint.native import dcp_metadata
from tokamake.checkpoint.tensors.extents import TensorSource
from tokamake.checkpoint.torch_files.pickle_reader import View, data_offset
from tokamake.checkpoint.torch_files.torch_archive import checksum
from tokamake.errors import UserError


def check_checksums(source: TensorSource, *, workers: int) -> None:
    """Compare what tensors' files hold with the checksums in them, where they have any.

    Files are read once, in whole. Safetensors have no checksums, nor have files of torch before
    1.6.

    Args:
        source: whose files to read.
        workers: files that are read at once.

    Raises:
        UserError: a bit has changed; the message names the file and its record.
    """
    files = sorted({region.file for region in source.regions})
    folders = {file.parent for file in files if file.suffix == dcp_metadata.SUFFIX}
    parts = {file: some for each in folders for file, some in dcp_metadata.archives(each).items()}
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda file: _check(file, parts), files):
            pass


def _check(file: Path, parts: Mapping[Path, list[tuple[int, int]]]) -> None:
    with file.open("rb") as stream:
        for start, length in parts.get(file, [(0, file.stat().st_size)]):
            part = View(stream, start, length)
            if not zipfile.is_zipfile(part):
                continue
            with zipfile.ZipFile(part) as archive:
                # 0 is what a writer leaves that took none.
                for entry in (entry for entry in archive.infolist() if entry.CRC):
                    place = start + data_offset(part, entry)
                    if checksum(stream.fileno(), place, entry.file_size) != entry.CRC:
                        raise UserError(
                            f"{file}: damaged: {entry.filename} is not what its checksum says; "
                            "fetch or write the checkpoint again"
                        )
