"""State that all requests of a server share: models and queue. Requests wait for their turn."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import Request

from tokamake.serve.engine_loop import Continuation, EngineLoop, EngineWork
from tokamake.serve.options import Limits
from tokamake.serve.request_body import RequestError
from tokamake.serve.served_model import ServedModel
from tokamake.serve.server_metrics import ServerMetrics


@dataclass
class ModelServer:
    """Models behind one queue. Only the thread of the HTTP server uses it."""

    models: Sequence[ServedModel]
    """The first one serves requests that name none."""
    engine_loop: EngineLoop
    limits: Limits
    metrics: ServerMetrics
    num_pending: int = 0
    """Sequences that wait or continue."""

    def model(self, name: str | None) -> ServedModel:
        """The model that a request names."""
        if name is None:
            return self.models[0]
        for model in self.models:
            if model.name == name:
                return model
        names = ", ".join(model.name for model in self.models)
        message = f"{name!a}: not served here; give one of {names}"
        raise RequestError(message, status=404, field="model", code="model_not_found")

    def check_number(self, number: int, *, field: str) -> None:
        """Check that the server can take a number of sequences, before they are made."""
        room = self.limits.batch_size + self.limits.max_queue
        if number > room:
            message = f"{number} sequences, but the server takes {room} at once; ask for fewer"
            raise RequestError(message, field=field)
        if self.num_pending + number > room:
            message = "the server is busy; try again later"
            raise RequestError(message, status=429, code="rate_limit_exceeded")

    def submit(self, request: Request, works: Sequence[EngineWork], *, field: str) -> "Submission":
        """Begin the work of a request; `field` says how many works there are."""
        self.check_number(len(works), field=field)
        return Submission(self, request, works=works)


class Submission:
    """The work of one request. It ends early if the client leaves, or if it takes too long."""

    def __init__(
        self, server: ModelServer, request: Request, *, works: Sequence[EngineWork]
    ) -> None:
        self._server, self._request, self._works = server, request, works
        self._is_late = False
        self._changed, self._is_changed = set[int](), asyncio.Event()
        prompts = sum(len(w.generation.prompt) for w in works if isinstance(w, Continuation))
        self._count(len(works), prompt_tokens=prompts)
        for number, work in enumerate(works):
            work.on_end = lambda: self._count(-1)
            work.on_change = partial(self._note_change, number)
            server.engine_loop.submit(work)
        self._watcher = asyncio.create_task(self._watch())

    async def ended(self) -> None:
        async for _ in self.changes():
            pass

    async def changes(self) -> AsyncIterator[int]:
        """Numbers of works that may have something new, until all have ended."""
        left = {*range(len(self._works))}
        try:
            while left:
                await self._is_changed.wait()
                self._is_changed.clear()
                changed, self._changed = self._changed, set()
                for number in sorted(changed & left):
                    work = self._works[number]
                    self._check(work)
                    if work.is_ended:
                        left.remove(number)
                    yield number
        finally:
            self.cancel()

    def cancel(self) -> None:
        self._watcher.cancel()
        for work in self._works:
            if not work.is_ended:
                self._server.engine_loop.cancel(work)

    def _note_change(self, number: int) -> None:
        self._changed.add(number)
        self._is_changed.set()

    def _check(self, work: EngineWork) -> None:
        if self._is_late:
            seconds = self._server.limits.max_seconds
            message = f"the request takes longer than {seconds:g} s; ask for less"
            raise RequestError(message, status=503, code="timeout")
        if work.failure:
            raise RequestError(work.failure, status=500)
        if isinstance(work, Continuation) and work.generation.finish == "cancelled":
            raise RequestError("the client has closed the connection", status=499)

    async def _watch(self) -> None:
        """Cancel the work when the client leaves or time is up."""
        try:
            async with asyncio.timeout(self._server.limits.max_seconds):
                while (await self._request.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            self._is_late = True
        for work in self._works:
            self._server.engine_loop.cancel(work)

    def _count(self, change: int, *, prompt_tokens: int = 0) -> None:
        self._server.num_pending += change
        self._server.metrics.sequences(change, prompt_tokens=prompt_tokens)
