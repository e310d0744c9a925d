"""Records of the WARC files that are written."""

import hashlib
import uuid
from datetime import UTC, datetime
from io import BytesIO

from tokamake.data.urls.pages import HttpAnswer

_DROPPED = ("transfer-encoding", "content-length", "connection", "keep-alive")
"""Headers of the connection: the stored body has no chunks, and its own length."""


def response(page: HttpAnswer) -> bytes:
    """Return the record of a page."""
    head = [f"HTTP/1.1 {page.status} {page.reason}"]
    head += [f"{name}: {value}" for name, value in page.headers if name.lower() not in _DROPPED]
    head += [f"Content-Length: {len(page.body)}", "", ""]
    content = "\r\n".join(head).encode("latin-1", "replace") + page.body
    return _record(
        "response",
        content,
        {"WARC-Target-URI": page.url, "Content-Type": "application/http; msgtype=response"},
        payload=page.body,
    )


def warcinfo(name: str, user_agent: str) -> bytes:
    """Return the first record of a WARC file."""
    fields = {
        "software": "tokamake",
        "http-header-user-agent": user_agent,
        "format": "WARC File Format 1.1",
        "robots": "obey",
    }
    content = "".join(f"{key}: {value}\r\n" for key, value in fields.items()).encode()
    return _record(
        "warcinfo", content, {"WARC-Filename": name, "Content-Type": "application/warc-fields"}
    )


def _record(
    kind: str, content: bytes, fields: dict[str, str], *, payload: bytes | None = None
) -> bytes:
    from fastwarc.warc import WarcRecord, WarcRecordType

    record = WarcRecord()
    record.init_headers(
        record_type=getattr(WarcRecordType, kind), record_urn=f"uuid:{uuid.uuid4()}".encode()
    )
    record.headers["WARC-Date"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for key, value in fields.items():
        record.headers[key] = value
    record.set_bytes_content(content)
    # SHA-1 is what readers of WARC files check; the journal notes SHA-256.
    digest = None if payload is None else hashlib.sha1(payload, usedforsecurity=False).digest()
    stream = BytesIO()
    record.write(stream, checksum_data=True, payload_digest=digest)
    return stream.getvalue()
