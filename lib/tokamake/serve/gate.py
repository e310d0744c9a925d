"""Checks of each request before it is answered: token or host, size and time of its body."""

import asyncio
import hmac
import ipaddress
import re
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

from fastapi.responses import JSONResponse

from tokamake.serve.model_server import ModelServer
from tokamake.serve.request_body import RequestError

_OPEN = {"/", "/healthz"}
"""Open without a token: the page (which asks for it) and health checks."""
_METHODS = {"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"}
BODY_SECONDS = 60.0
"""Longest time in which a body comes."""


class Gate:
    """ASGI middleware; without a token, requests need none."""

    def __init__(self, app: Any, server: ModelServer, *, hosts: Set[str], token: str) -> None:
        self._app, self._hosts = app, hosts
        self._max_body, self._metrics = server.limits.max_body, server.metrics
        self._token = token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
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
            if self._token:
                self._check_token(scope["path"], headers)
            else:
                check_host(scope["headers"], self._hosts)
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
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        is_valid = scheme.lower() == b"bearer" and hmac.compare_digest(given, self._token)
        if path not in _OPEN and not is_valid:
            raise RequestError(
                "no valid token; send the header Authorization: Bearer TOKEN",
                status=401,
                code="invalid_api_key",
            )

    async def _body_in_time(self, headers: Mapping[bytes, bytes], receive: Any) -> bytes | None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._body(headers, receive)
        except TimeoutError:
            message = f"the body has not come within {BODY_SECONDS:g} s; send it faster"
            raise RequestError(message, status=408) from None

    async def _body(self, headers: Mapping[bytes, bytes], receive: Any) -> bytes | None:
        """Read the body; None if the client leaves before its end."""
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


def check_host(headers: Sequence[tuple[bytes, bytes]], own: Set[str]) -> None:
    """Check that a web page of another site did not make the request, by `Host` and `Origin`.

    Such a page reaches servers on this machine if its own name suddenly resolves to 127.0.0.1 (DNS
    rebinding). It cannot forge these headers.
    """
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
    if len(hosts) != 1 or not is_own(hosts[0], own):
        message = f"Host: {', '.join(hosts)!a}: not a name of this server; use its --host"
    elif foreign := [o for o in origins if o not in (f"http://{hosts[0]}", f"https://{hosts[0]}")]:
        message = f"Origin: {foreign[0]!a}: a page of another site; use the page of this server"
    else:
        return
    raise RequestError(f"{message}, or start it with --token-file", status=403)


def is_own(authority: str, own: Set[str]) -> bool:
    """Whether a host, which a port may follow, is among names of a server, or a loopback name."""
    match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^\[\]:/@]+)(:[0-9]*)?", authority)
    name = match[1].strip("[]") if match else ""
    is_wildcard = not own.isdisjoint({"0.0.0.0", "::"})
    try:
        # Names can be bound to other addresses, but addresses cannot.
        is_address = ipaddress.ip_address(name).is_loopback or is_wildcard
    except ValueError:
        is_address = False
    return is_address or name == "localhost" or name in own
