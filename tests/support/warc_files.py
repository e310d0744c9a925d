"""WARC records as bytes, and pages for them."""

TEXT = "Rivers carry water to the sea. This paragraph is long enough to be the main text of a page."
PAGE = f"<html><head><title>T</title></head><body><main><p>{TEXT}</p></main></body></html>"


def record(kind: str, content: bytes, *, length: object = None, **fields: str) -> bytes:
    """A record; fields are named as in Python: Content_Type. `length` is a wrong Content-Length."""
    lines = [
        "WARC/1.0",
        f"WARC-Type: {kind}",
        "WARC-Record-ID: <urn:uuid:1>",
        "WARC-Date: 2024-01-02T03:04:05Z",
        *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items()),
        f"Content-Length: {len(content) if length is None else length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content + b"\r\n\r\n"


def response(
    page: str | bytes = PAGE,
    *,
    status: int = 200,
    headers: str = "Content-Type: text/html; charset=utf-8",
    url: str = "http://example.org/",
    length: object = None,
) -> bytes:
    """A record of an HTTP response."""
    body = page.encode() if isinstance(page, str) else page
    return record(
        "response",
        f"HTTP/1.1 {status} X\r\n{headers}\r\n\r\n".encode() + body,
        length=length,
        WARC_Target_URI=url,
        Content_Type="application/http; msgtype=response",
    )


def conversion(text: str | bytes, **fields: str) -> bytes:
    """A record of a WET file."""
    content = text.encode() if isinstance(text, str) else text
    return record("conversion", content, Content_Type="text/plain", **fields)
