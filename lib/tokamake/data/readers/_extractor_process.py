"""Program that extracts the main text of HTML pages. `_extractor` starts it and talks to its pipes.

Arguments: the extractor, seconds of CPU time for a page, bytes of address space. A request is the
size of a charset, the size of a page, the charset and the page. A reply is a letter, a size and a
text: `t` for the text of the page, `e` for the reason why the page has none, `f` for a reason that
holds for every page.

It imports nothing of tokamake, so that it starts quickly.
"""

import codecs
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable

Extract = Callable[[str], str]

_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def main() -> None:
    """Answer requests until the pipe of requests ends."""
    name, seconds, num_bytes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a package prints is no reply
    failure = ""
    try:
        extract = _EXTRACTORS[name]()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    while header := requests.read(8):
        charset_bytes, page_bytes = struct.unpack("<II", header)
        charset, page = requests.read(charset_bytes).decode(), requests.read(page_bytes)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends this process
        kind, text = ("f", failure) if failure else _extract(extract, page, charset=charset)
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = text.encode(errors="replace")
        replies.write(struct.pack("<cI", kind.encode(), len(data)) + data)
        replies.flush()


def _extract(extract: Extract, page: bytes, *, charset: str) -> tuple[str, str]:
    try:
        return "t", extract(_decode(page, charset))
    except Exception as error:
        return "e", f"{type(error).__name__}: {error}"


def _decode(page: bytes, charset: str) -> str:
    """Decode by byte order mark, HTTP header, <meta>, or a guess, in this order as in browsers."""
    from resiliparse.parse import encoding

    for mark, name in _BYTE_ORDER_MARKS.items():
        if page.startswith(mark):
            return page.decode(name, errors="replace").removeprefix("\ufeff")
    stated = _html5_name(charset) if charset else None
    name = stated or encoding.detect_encoding(page, from_html_meta=True) or "utf-8"
    # Where the stated encoding does not fit, it tries UTF-8 and cp1252.
    return encoding.bytes_to_str(page, name, errors="replace")


def _html5_name(charset: str) -> str | None:
    """Return the encoding that browsers take a charset for; None for an unknown charset."""
    from resiliparse.parse import encoding

    if found := encoding.map_encoding_to_html5(charset, fallback_utf8=False):
        return found
    try:
        known = codecs.lookup(charset).name.replace("iso8859", "iso-8859")  # of latin-1
    except LookupError:
        return None
    return encoding.map_encoding_to_html5(known, fallback_utf8=False)


def _resiliparse() -> Extract:
    from resiliparse.extract.html2text import extract_plain_text

    return lambda html: extract_plain_text(html, main_content=True, alt_texts=False)


def _trafilatura() -> Extract:
    import trafilatura

    # FineWeb's options, but `deduplicate`: it compares with pages that the process has read before.
    return lambda html: (
        trafilatura.extract(html, favor_precision=True, include_comments=False) or ""
    )


_EXTRACTORS = {"resiliparse": _resiliparse, "trafilatura": _trafilatura}

if __name__ == "__main__":
    main()
