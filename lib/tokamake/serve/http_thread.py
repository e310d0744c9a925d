"""Thread that answers HTTP, beside the main thread that runs the models."""

import asyncio
import socket
import threading
from functools import partial
from typing import cast

import uvicorn

from tokamake.serve.app import make_app
from tokamake.serve.gate import BODY_SECONDS
from tokamake.serve.model_server import ModelServer
from tokamake.serve.uvicorn_internals import BoundedProtocol

_LAST_EVENT_SECONDS = 5
"""Time after the grace in which the last events reach their clients."""


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
        """Take no new requests, and end when those in flight have ended; at once if called twice.

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
