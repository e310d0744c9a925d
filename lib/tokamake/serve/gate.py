"""Checks of each request before it is answered: token, size of the body, number of requests."""

import asyncio
import hmac
import time
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from tokamake.serve.request_error import RequestError
from tokamake.serve.server_metrics import ServerMetrics

_OPEN = {"/", "/healthz"}
"""Paths without a token: the page asks for one, and health checks have none."""
_METHODS = {"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"}
_BODY_SECONDS = 60.0
"""Longest time in which a body comes."""


class Gate:
    """ASGI middleware.

    Args:
        app: what answers.
        token: bearer token of requests; empty: none is needed.
        max_body: largest body in bytes.
        metrics: counts requests.
    """

    def __init__(self, app: Any, *, token: str, max_body: int, metrics: ServerMetrics) -> None:
        self._app, self._max_body, self._metrics = app, max_body, metrics
        self._header = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def counted_send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, counted_send)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            seconds = time.perf_counter() - start
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.request(method, path, status=status, seconds=seconds)

    async def _admit(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            headers = dict(scope["headers"])
            self._check_token(scope["path"], headers)
            body = await self._body_in_time(headers, receive)
        except RequestError as error:
            challenge = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            reply = JSONResponse(error.body, status_code=error.status, headers=challenge)
            await reply(scope, receive, send)
            return
        if body is None:  # the client has left
            return
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Any:
            return pending.pop() if pending else await receive()

        await self._app(scope, replayed, send)

    def _check_token(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if not self._header or path in _OPEN:
            return
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, self._header):
            raise RequestError(
                "no valid token; send the header Authorization: Bearer TOKEN",
                status=401,
                code="invalid_api_key",
            )

    async def _body_in_time(self, headers: Mapping[bytes, bytes], receive: Any) -> bytes | None:
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                return await self._body(headers, receive)
        except TimeoutError:
            message = f"the body has not come within {_BODY_SECONDS:g} s; send it faster"
            raise RequestError(message, status=408) from None

    async def _body(self, headers: Mapping[bytes, bytes], receive: Any) -> bytes | None:
        """Read the body; None if the client leaves before its end.

        Raises:
            RequestError: it is too large.
        """
        stated = headers.get(b"content-length", b"0")
        if stated.isdigit() and int(stated[:20]) > self._max_body:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise self._too_large()
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> RequestError:
        message = f"the body has more than {self._max_body} bytes; send less, or raise --max-body"
        return RequestError(message, status=413)
