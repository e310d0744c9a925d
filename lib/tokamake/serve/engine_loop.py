"""Loop of the main thread that runs the models of a server.

The thread of the HTTP server hands it sequences; the loop wakes their requests.
"""

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from tokamake.errors import UserError
from tokamake.inference.beams import Beam
from tokamake.inference.engine import Generation, InferenceEngine
from tokamake.inference.text_stream import TextStream
from tokamake.runtime.device import is_out_of_memory
from tokamake.serve.served_model import ServedModel
from tokamake.serve.server_metrics import ServerMetrics

_NO_MEMORY = (
    "the device has too little memory for this request beside the running ones; ask for less, or "
    "start the server with a smaller --batch-size or --max-length"
)


class EngineWork:
    """Work that a request waits for. Only the thread of the HTTP server calls its methods.

    Attributes:
        failure: why it ended without a result; empty if it did not.
        on_change: called when there may be something new.
        on_end: called at the end, before `on_change`.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.is_ended, self.failure = False, ""
        self.on_change: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.loop = asyncio.get_running_loop()

    def fail(self, error: Exception) -> None:
        """Note an error that ends only this work."""
        reason = f"the model has failed: {error}"
        if isinstance(error, UserError):
            reason = str(error).removeprefix("checkpoint: ")
        elif is_out_of_memory(error):
            reason = _NO_MEMORY
        else:
            traceback.print_exception(error)
        self.failure = f"{self.model.name}: {reason}"
        print(f"tokamake: a request has failed: {self.failure}", file=sys.stderr, flush=True)

    def wake(self, *, is_ended: bool) -> None:
        """Tell the request that there may be something new."""
        if is_ended and not self.is_ended:
            self.is_ended = True
            self.on_end()
        self.on_change()


class Continuation(EngineWork):
    """A sequence that an engine continues.

    Attributes:
        is_streamed: whether each token wakes the request.
        latest: time of the latest token, or of the request.
        is_wanted_after: called with the text that each token adds; False ends the sequence.
        published: characters and tokens that the request may see.
    """

    def __init__(
        self, model: ServedModel, generation: Generation, *, text: TextStream, is_streamed: bool
    ) -> None:
        super().__init__(model)
        self.generation, self.text = generation, text
        self.is_streamed, self.latest = is_streamed, time.perf_counter()
        self.published = 0, 0
        self.is_wanted_after: Callable[[str], bool] = lambda _: not text.is_stopped
        generation.accept = lambda token: self.is_wanted_after(text.add(token))

    def publish(self) -> None:
        """Let the request see the tokens so far, and their text."""
        generation = self.generation
        try:
            if generation.finish:
                self.text.finish()
        except Exception as error:  # of the tokenizer's package
            generation.error = error
        if generation.error:
            self.fail(generation.error)
        num_tokens = len(generation.tokens) + (generation.end_token is not None)
        self.published = len(self.text.text), num_tokens


class BeamSearch(EngineWork):
    """A beam search, which runs alone: earlier sequences end first, later ones wait.

    `run` searches, and asks its argument whether to continue.
    """

    def __init__(self, model: ServedModel, run: Callable[[Callable[[], bool]], list[Beam]]) -> None:
        super().__init__(model)
        self.beams: list[Beam] = []
        self.is_wanted = True
        self.run = run


class EngineLoop:
    """Runs engines in turn until it is stopped."""

    def __init__(self, engines: Sequence[InferenceEngine], metrics: ServerMetrics) -> None:
        self._engines, self._metrics = engines, metrics
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queue: deque[EngineWork] = deque()
        self._continued: dict[Generation, Continuation] = {}
        self._is_stopped, self._lock = False, threading.Lock()

    # ---- Called by the thread of the HTTP server ----

    def submit(self, work: EngineWork) -> None:
        """Begin work, or end it at once if the loop is stopped."""
        with self._lock:
            if not self._is_stopped:
                self._inbox.put(lambda: self._queue.append(work))
                return
        work.failure = "the server stops"
        work.wake(is_ended=True)

    def cancel(self, work: EngineWork) -> None:
        """End work that nobody waits for any more."""
        if isinstance(work, BeamSearch):
            work.is_wanted = False
        self._inbox.put(lambda: self._cancel(work))

    def stop(self) -> None:
        self._inbox.put(self._stop)

    # ---- The main thread ----

    def run(self) -> None:
        """Do the work of requests, until `stop`."""
        failure = "the server stops"
        try:
            while not self._is_stopped:
                self._round()
        except BaseException:
            failure = "the server has failed; its log says why"
            raise
        finally:
            self._stop()
            while not self._inbox.empty():
                self._inbox.get()()
            left = [*self._continued.values(), *self._queue]
            for work in left:
                work.failure = failure
            _wake(left, is_ended=True)

    def _stop(self) -> None:
        with self._lock:
            self._is_stopped = True

    def _cancel(self, work: EngineWork) -> None:
        if isinstance(work, Continuation):
            work.model.engine.cancel(work.generation)
        if work in self._queue:
            self._queue.remove(work)
            _wake([work], is_ended=True)

    def _round(self) -> None:
        """Take messages, wait for one if there is nothing to do, and advance all sequences."""
        if not self._continued and not self._queue:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        self._begin()
        for engine in self._engines:
            if engine.num_active or engine.num_waiting:
                self._report(self._stepped(engine))

    def _stepped(self, engine: InferenceEngine) -> list[Generation]:
        """Advance sequences. The sequences of a step that needs too much memory fail."""
        try:
            return engine.step()
        except Exception as error:
            # Other ranks may have done the step, and would be out of step.
            if engine.num_ranks > 1 or not is_out_of_memory(error):
                raise
            return engine.drop_pass(error)

    def _begin(self) -> None:
        """Begin work in the order in which it came, up to a search, which needs all places."""
        while self._queue:
            work = self._queue[0]
            if isinstance(work, BeamSearch):
                if not self._continued:
                    self._queue.popleft()
                    self._search(work)
                return
            self._queue.popleft()
            if isinstance(work, Continuation):
                self._continued[work.generation] = work
                work.model.engine.add(work.generation)

    def _search(self, search: BeamSearch) -> None:
        """Run a search; an error of it ends its request alone, unless ranks are out of step."""
        try:
            search.beams = search.run(lambda: search.is_wanted)
        except Exception as error:
            search.fail(error)
            # A `UserError`, logits that are not finite, comes after a pass of all ranks.
            if search.model.engine.num_ranks > 1 and not isinstance(error, UserError):
                raise
        finally:
            _wake([search], is_ended=True)

    def _report(self, advanced: Sequence[Generation]) -> None:
        """Wake the requests of sequences that ended or got a token."""
        ended, changed = list[EngineWork](), list[EngineWork]()
        for generation in advanced:
            work = self._continued[generation]
            number = len(generation.tokens)
            if number and generation.finish not in ("cancelled", "eod", "failed"):
                work.latest = self._metrics.token(work.latest, is_first=number == 1)
            if generation.finish:
                del self._continued[generation]
                work.publish()
                ended.append(work)
            elif work.is_streamed:
                work.publish()
                changed.append(work)
        _wake(changed, is_ended=False)
        _wake(ended, is_ended=True)


def _wake(works: Iterable[EngineWork], *, is_ended: bool) -> None:
    """Wake requests with one message to the thread of the HTTP server."""
    works = [*works]
    # After the time of grace, the loop of the other thread is closed.
    with suppress(RuntimeError):
        if works:
            works[0].loop.call_soon_threadsafe(_wake_here, works, is_ended)


def _wake_here(works: Sequence[EngineWork], is_ended: bool) -> None:
    for work in works:
        work.wake(is_ended=is_ended)
