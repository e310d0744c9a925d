"""Checksums that are in a checkpoint's files already: torch's zip archives have CRC-32s."""

import zipfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokamake.checkpoint.files import dcp_metadata
from tokamake.checkpoint.files.torch_files import checksum
from tokamake.checkpoint.files.torch_pickles import View, data_offset
from tokamake.checkpoint.regions import Source
from tokamake.errors import UserError

_DCP = ".distcp"
"""Files of many archives, one after the other."""


def check_checksums(source: Source, *, workers: int) -> None:
    """Compare what tensors' files hold with the checksums in them, where they have any.

    Files are read once, in whole. Safetensors have no checksums, nor have files of torch before
    1.6, nor tokamake's own format where `convert` wrote it.

    Args:
        source: whose files to read.
        workers: files that are read at once.

    Raises:
        UserError: a bit has changed; the message names the file and its record.
    """
    files = sorted({region.file for region in source.regions})
    parts = _parts({file.parent for file in files if file.suffix == _DCP})
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda file: _check(file, parts), files):
            pass


def _parts(folders: Iterable[Path]) -> dict[Path, list[tuple[int, int]]]:
    """First byte and length of each archive in torch's distributed checkpoints, by file."""
    found: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    for folder in folders:
        for tensor in dcp_metadata.read(folder).values():
            for box in tensor.boxes:
                if box.place:
                    found[folder / box.place.file].append((box.place.offset, box.place.length))
    return found


def _check(file: Path, parts: dict[Path, list[tuple[int, int]]]) -> None:
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
