"""Small files cannot make the readers take much memory."""

import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tokamake.checkpoint.torch_files import pickle_bounds

PEAKS = """
import json, os, sys
from pathlib import Path
from tokamake.checkpoint.torch_files import dcp_metadata
from tokamake.checkpoint.torch_files import pickle_reader
from tokamake.errors import UserError

def read(file):
    message = ""
    try:
        dcp_metadata.read(file.parent) if file.name == ".metadata" else pickle_reader.read(file, "")
    except UserError as error:
        message = str(error)
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    print(json.dumps([message, int(peak) * 1024]), flush=True)

for name in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0
    else:
        read(Path(name))
        os._exit(0)
"""


def messages_and_peaks(*files: Path) -> list[tuple[str, int]]:
    """Error of the reader of each file, and the most bytes of memory that its process took."""
    command = [sys.executable, "-c", PEAKS, *map(str, files)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == len(files)
    return found


def archive(file: Path, pickled: bytes, compression: int, **others: bytes) -> Path:
    with zipfile.ZipFile(file, "w", compression) as stream:
        for name, content in {"data.pkl": pickled, **others}.items():
            stream.writestr(f"archive/{name}", content)
    return file


def repeated(call: bytes, argument: bytes, *, num_calls: int = 50_000) -> bytes:
    """A pickle that calls something again and again with the same long argument."""
    one_call = b"h\x00h\x01" + call
    return b"\x80\x02" + argument + b"q\x01" + one_call * num_calls + b"."


LONG_LIST = b"(" + b"N" * 50_000 + b"l"
LONG_TUPLE = b"(" + b"N" * 50_000 + b"t"
BOMBS = {
    "memo index": b"\x80\x02Nr" + struct.pack("<I", 2**28) + b"." + b" " * 153,
    "memo index in text": b"Np268435456\n.",
    "set": b"cbuiltins\nfrozenset\nq\x00" + repeated(b"\x85R", LONG_LIST),
    "size": b"ctorch\nSize\nq\x00" + repeated(b"\x85R", LONG_LIST),
    "dict": b"ccollections\nOrderedDict\nq\x00"
    + repeated(b"\x85R", b"(" + b"NN\x86" * 9999 + b"l"),
    "arguments": b"cnumpy.core\nx\nq\x00" + repeated(b"R", LONG_TUPLE),
    "attributes": b"cargparse\nNamespace\nq\x00"
    + b"".join([b"\x80\x02}(", *(b"X\x04\0\0\0%04dN" % n for n in range(9999)), b"uq\x01"])
    + b"h\x00)\x81h\x01b" * 5000
    + b".",
}


def test_a_small_pickle_takes_little_memory(tmp_path: Path) -> None:
    files = [
        archive(tmp_path / f"{name}.pt", bomb, zipfile.ZIP_STORED) for name, bomb in BOMBS.items()
    ]
    for file, (message, peak) in zip(files, messages_and_peaks(*files), strict=True):
        assert peak < 200e6, file
        if file.stem != "attributes":  # they share one dict
            assert message.startswith(f"{file}: ")


def test_small_metadata_takes_little_memory(tmp_path: Path) -> None:
    files = [tmp_path / name / ".metadata" for name in ("memo index", "memo index in text", "size")]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(BOMBS[file.parent.name])
    for message, peak in messages_and_peaks(*files):
        assert "no complete checkpoint (its pickle" in message
        assert peak < 200e6


@pytest.mark.parametrize("large", ["data.pkl", "byteorder"])
def test_compressed_entries_are_not_expanded(large: str, tmp_path: Path) -> None:
    content = {"data.pkl": b"\x80\x02N.", "byteorder": b"little"}
    content[large] += b"\0" * 230_000_000
    pickled = content.pop("data.pkl")
    file = archive(tmp_path / "a.pt", pickled, zipfile.ZIP_DEFLATED, **content)
    assert file.stat().st_size < 400_000
    ((message, peak),) = messages_and_peaks(file)
    assert f"archive/{large} is compressed" in message or "byteorder is compressed" in message
    assert peak < 200e6


def test_a_long_byteorder_is_refused(tmp_path: Path) -> None:
    others = {"byteorder": b"little" + b" " * 6_000_000}
    file = archive(tmp_path / "a.pt", b"\x80\x02N.", zipfile.ZIP_STORED, **others)
    assert "byteorder has 6,000,006 bytes, over 6" in messages_and_peaks(file)[0][0]


@pytest.mark.parametrize("protocol", range(6))
def test_valid_pickles_are_accepted(protocol: int) -> None:
    value = {
        "numbers": [0, -1, 255, 70_000, -(2**31) - 1, 10**30, 2**3000, 1.5, complex(1, 2)],
        "text": ["", "r", "p1\n", "x" * 300, "Ünï\n" * 20_000, *map(str, range(70_000))],
        "bytes": [b"", b"r....", b"y" * 300, bytearray(b"z" * 300)],
        "collections": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {1, 2}, frozenset([3])],
        "plain": [None, True, False, Path, pickle.PickleError],
    }
    pickled = pickle.dumps(value, protocol)
    pickle_bounds.check(pickled)
    with pytest.raises(ValueError, match="its pickle is truncated"):
        pickle_bounds.check(pickled[:-1])  # so all of it was read


def test_memo_indexes_up_to_the_length_are_accepted() -> None:
    for length in (1000, 2**16, 2**20, 2**24 + 2**20):
        padding = b"N0" * (length // 2)
        pickle_bounds.check(b"Nr" + struct.pack("<I", length) + padding + b".")
        with pytest.raises(ValueError, match="memo index"):
            bad = max(2**16, 2 * length) + 2**24 * (length > 2**24)
            pickle_bounds.check(b"Nr" + struct.pack("<I", bad) + padding + b".")
