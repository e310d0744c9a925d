"""The HTTP application of a server, and the thread that answers with it.

The main thread runs the models.
"""

import asyncio
import socket
import threading
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tokamake.serve.gate import BODY_SECONDS, Gate
from tokamake.serve.megatron_api import MegatronRequest, check_old_fields, megatron_routes
from tokamake.serve.model_server import ModelServer
from tokamake.serve.openai_api import openai_routes
from tokamake.serve.openai_requests import ChatRequest, CompletionRequest
from tokamake.serve.request_body import RequestError, descriptions, of_validation
from tokamake.serve.uvicorn_internals import BoundedProtocol

_LAST_EVENT_SECONDS = 5
"""Time after the grace in which the last events reach their clients."""
_PAGE = Path(__file__).parent / "page.html"
_BODIES: dict[str, type[BaseModel]] = {
    "/api": MegatronRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


def make_app(server: ModelServer, *, hosts: Set[str], token: str) -> Any:
    """The application; without a token, requests need none."""
    # The pages that FastAPI makes load scripts from other hosts.
    app = FastAPI(title="tokamake", docs_url=None, redoc_url=None)
    app.include_router(openai_routes(server))
    app.include_router(megatron_routes(server))

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        """A page to try prompts."""
        return _PAGE.read_text(encoding="utf-8")

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counts and times for Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _failed)
    app.add_exception_handler(Exception, _broken)
    return Gate(app, server, hosts=hosts, token=token)


async def _refused(_: Request, error: Any) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status)


async def _invalid(request: Request, error: Any) -> JSONResponse:
    path = request.url.path
    fields = descriptions(_BODIES[path]) if path in _BODIES else {}
    try:
        if path == "/api":
            check_old_fields(error.body)
        refusal = of_validation(error.errors(), fields)
    except RequestError as old:
        refusal = old
    return await _refused(request, refusal)


async def _broken(request: Request, _: Any) -> JSONResponse:
    """Errors of the server itself, whose traces its log has."""
    message = f"{request.method} {request.url.path}: the server has failed; its log says why"
    return await _refused(request, RequestError(message, status=500))


async def _failed(request: Request, error: Any) -> JSONResponse:
    """Unknown paths and methods, and bodies that cannot be decoded."""
    message = f"{request.method} {ascii(request.url.path)[1:-1]}: {error.detail}"
    if error.status_code == 400:
        message = (
            "the body is not JSON: it is nested too deeply, not UTF-8, or has an endless number"
        )
    return await _refused(request, RequestError(message, status=error.status_code))


class HttpThread:
    """The HTTP server of a `ModelServer`. At its end, it stops the engine loop."""

    def __init__(
        self, server: ModelServer, listener: socket.socket, *, host: str, token: str
    ) -> None:
        self._server, self._listener = server, listener
        self._failure: BaseException | None = None
        own = {host.lower(), listener.getsockname()[0]}
        if not own.isdisjoint({"0.0.0.0", "::"}):
            own.add(socket.gethostname().lower())
        limits = server.limits
        protocol = partial(
            BoundedProtocol,
            # A client gets the last part of its reply within the time of another body.
            request_seconds=2 * BODY_SECONDS + limits.max_seconds,
            max_connections=limits.batch_size + limits.max_queue + 256,
        )
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                make_app(server, hosts=own, token=token),
                http=cast("type[asyncio.Protocol]", protocol),
                ws="none",
                log_level="error",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=round(limits.grace_seconds) + _LAST_EVENT_SECONDS,
            )
        )
        self._thread = threading.Thread(target=self._answer, name="http")

    def start(self) -> None:
        """Begin to answer; from now on, connections wait until they are answered."""
        self._listener.listen(self._uvicorn.config.backlog)
        self._thread.start()

    def stop(self) -> None:
        """Take no new requests, and end when all requests have ended; at once if called twice.

        Signal handlers may call it.
        """
        if self._uvicorn.should_exit:
            self._uvicorn.force_exit = True
            return
        self._uvicorn.should_exit = True
        # uvicorn would cut the connections without a word. The engine loop gives a reason.
        loop = self._server.engine_loop
        end_of_grace = threading.Timer(self._server.limits.grace_seconds, loop.stop)
        end_of_grace.daemon = True  # the process may end before
        end_of_grace.start()

    def end(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()
        if self._failure:
            raise self._failure

    def _answer(self) -> None:
        try:
            self._uvicorn.run(sockets=[self._listener])
        except BaseException as error:  # `end` raises it in the main thread
            self._failure = error
        finally:
            self._server.engine_loop.stop()
