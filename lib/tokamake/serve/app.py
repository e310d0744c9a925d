"""The HTTP application of a server."""

from collections.abc import Set
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tokamake.serve.gate import Gate
from tokamake.serve.megatron_api import MegatronRequest, check_old_fields, megatron_routes
from tokamake.serve.model_server import ModelServer
from tokamake.serve.openai_api import openai_routes
from tokamake.serve.openai_requests import ChatRequest, CompletionRequest
from tokamake.serve.request_error import RequestError, of_validation
from tokamake.serve.request_fields import descriptions

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
