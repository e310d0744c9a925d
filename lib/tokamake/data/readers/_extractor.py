"""Main text of HTML pages, by processes of their own.

No extractor is safe with every page: resiliparse takes minutes for 100,000 nested elements. A page
that ends its process, or takes more time or memory than a limit, is a bad document. Extraction is
also slower than all other steps, and several processes share it.
"""

import signal
import struct
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, NamedTuple

from tokamake.data.readers._records import BadRecord
from tokamake.errors import UserError

LONGEST_PAGE_BYTES = 1 << 24
"""Maximum size of a page; an extractor may need a hundred times as much memory."""
_SECONDS = 20
"""CPU time of a page; a page of 13 KB takes milliseconds."""
_MEMORY_BYTES = 4 << 30
"""Address space of a process."""
_PROGRAM = Path(__file__).with_name("_extractor_process.py")
_PACKAGES = {"resiliparse": ("resiliparse",), "trafilatura": ("resiliparse", "trafilatura")}
"""Packages of each extractor; resiliparse also finds encodings."""
_FAULTS = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGTRAP,
}
"""Signals by which a page ends a process; others come from outside."""


class WebPage(NamedTuple):
    content: bytes
    charset: str = ""
    """Encoding that an HTTP header states."""


@cache
def open_extractor(name: str, num_processes: int) -> "Extractor":
    """Return the extractor of a name; its processes serve all files that this process reads."""
    missing = [package for package in _PACKAGES[name] if find_spec(package) is None]
    if missing:
        raise UserError(
            f"extractor {name}: needs the package {missing[0]}; pip install 'tokamake[corpora]'"
        )
    return Extractor(name, num_processes)


class Extractor:
    def __init__(self, name: str, num_processes: int) -> None:
        self._name = name
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(num_processes)

    def texts(self, pages: Iterable[WebPage]) -> list[str | BadRecord]:
        """Return the text of each page in order, or the reason why it has none."""
        return list(self._threads.map(self._text, pages))

    def _text(self, page: WebPage) -> str | BadRecord:
        if len(page.content) > LONGEST_PAGE_BYTES:
            return self._failed(page, f"the page is longer than {LONGEST_PAGE_BYTES:,} bytes")
        process = self._take()
        reply = _ask(process, page)
        if reply is None:
            return self._failed(page, self._why_ended(process))
        self._idle.put(process)
        kind, text = reply
        if kind == "f":
            raise UserError(
                f"extractor {self._name}: cannot be imported ({text}); "
                "pip install 'tokamake[corpora]'"
            )
        return text if kind == "t" else self._failed(page, text)

    def _take(self) -> "subprocess.Popen[bytes]":
        try:
            return self._idle.get_nowait()
        except Empty:
            # -P: its folder has modules such as csv.py, which must not hide Python's own.
            command = [sys.executable, "-P", str(_PROGRAM), self._name]
            return subprocess.Popen(
                [*command, str(_SECONDS), str(_MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )

    def _failed(self, page: WebPage, fault: str) -> BadRecord:
        fault = " ".join(fault.split())[:300]
        return BadRecord(f"{self._name} cannot read the page ({fault}); leave it out", page.content)

    def _why_ended(self, process: "subprocess.Popen[bytes]") -> str:
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            _close(stream)
        if code == -signal.SIGPROF:
            return f"it took more than {_SECONDS} s of CPU time"
        if -code in _FAULTS:
            return f"it ended the process by {signal.Signals(-code).name}"
        raise UserError(
            f"extractor {self._name}: its process has ended with status {code}; if the job has too "
            "little memory, give it more, and rerun"
        )


def _ask(process: "subprocess.Popen[bytes]", page: WebPage) -> tuple[str, str] | None:
    """Return the letter and the text of a reply, or None if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    charset = page.charset.encode()
    try:
        process.stdin.write(struct.pack("<II", len(charset), len(page.content)) + charset)
        process.stdin.write(page.content)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    header = process.stdout.read(5)
    if len(header) < 5:
        return None
    kind, size = struct.unpack("<cI", header)
    data = process.stdout.read(size)
    return (kind.decode(), data.decode()) if len(data) == size else None


def _close(stream: IO[bytes] | None) -> None:
    try:
        if stream is not None:
            stream.close()
    except BrokenPipeError:  # a request that the process did not read
        pass
