"""Connections with bounds that uvicorn has no settings for (checked with uvicorn 0.54)."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 20.0
"""Longest time from the start of a connection, or from a reply, to the end of the next head."""
_HEAD_BYTES = 65536
"""Most bytes of a request beside its body: its head, sizes of chunks, and trailers. Bytes that come
together with its beginning do not count."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection that ends if the client sends or reads too slowly.

    Args:
        request_seconds: longest time from the head of a request to the end of its reply.
        max_connections: a further connection ends at once.
    """

    def __init__(self, *, request_seconds: float, max_connections: int, **options: Any) -> None:
        super().__init__(**options)
        self._request_seconds, self._max_connections = request_seconds, max_connections
        self._num_bytes_beside = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end_in(HEAD_SECONDS if len(self.connections) <= self._max_connections else 0)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer:
            self._timer.cancel()

    def _end_in(self, seconds: float) -> None:
        """End the connection after a time, unless this is called again before."""
        if self._timer:
            self._timer.cancel()
        # `close` would wait until the client has read all.
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._num_bytes_beside += len(data)
        super().data_received(data)
        if self._num_bytes_beside > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The headers have too many bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_bytes_beside = 0

    def on_body(self, body: bytes) -> None:
        self._num_bytes_beside -= len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if not self.url.startswith(b"/"):  # HTTP/1.1 lets the host of such a target count
            self.headers.append((b"host", self.url))
        self._end_in(self._request_seconds)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._end_in(self._request_seconds if self.pipeline else HEAD_SECONDS)
        super().on_response_complete()
