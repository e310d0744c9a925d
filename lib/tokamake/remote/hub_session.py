"""Bounds on answers of a Hub: no mirror fills memory or keeps a job waiting for ever."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokamake.errors import UserError

_MAX_ANSWER_BYTES = 64 << 20
"""A page of a listing has up to 1,000 files, some 300 kB."""
_MAX_ANSWERS = 10_000
_MAX_SECONDS = 300.0
"""Longest time that an answer may take."""
_TIMEOUT = 30.0
"""Seconds without a byte after which huggingface_hub tries again."""


@contextmanager
def bounded_answers(address: str) -> Iterator[None]:
    """Bound the number, size and time of the answers that huggingface_hub reads in the block.

    Raises:
        UserError: an answer exceeds a bound, or is compressed.
    """
    from huggingface_hub import get_session, set_client_factory

    session = get_session()
    # Version 1 of huggingface_hub uses httpx, version 2 httpx2. Their names are the same.
    http: Any = sys.modules[type(session).__module__.partition(".")[0]]
    hooks, bounds = session.event_hooks, _AnswerBounds(address)

    class AnswerBody(http.SyncByteStream):
        """Bounded body of an answer; the client demands the base class."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __iter__(self) -> Iterator[bytes]:
            return bounds.read(self.stream)

        def close(self) -> None:
            self.stream.close()

    def bind(response: Any) -> None:
        bounds.check_coding(response)
        response.stream = AnswerBody(response.stream)

    bounded = {"request": [*hooks["request"], bounds.ask], "response": [*hooks["response"], bind]}
    set_client_factory(lambda: http.Client(event_hooks=bounded, follow_redirects=True))
    try:
        yield
    finally:
        options = {"follow_redirects": True, "timeout": None}
        set_client_factory(lambda: http.Client(event_hooks=hooks, **options))


class _AnswerBounds:
    """Bounds on the answers to the requests for one address."""

    def __init__(self, address: str) -> None:
        self._address, self._requests = address, 0
        self._host = b""

    def ask(self, request: Any) -> None:
        """Count a request; bound its waits, which huggingface_hub does not.

        Only the first host gets the token.
        """
        self._requests += 1
        if "Authorization" in request.headers:
            self._host = self._host or request.url.netloc
            if request.url.netloc != self._host:
                raise self._error(f"its listing continues at another host, {request.url.host}")
        if self._requests > _MAX_ANSWERS:
            raise self._error(f"no end of its listing after {_MAX_ANSWERS:,} requests")
        request.headers["Accept-Encoding"] = "identity"  # 9 MB of gzip may hold 2 GB
        waits = dict.fromkeys(("connect", "read", "write", "pool"), _TIMEOUT)
        request.extensions["timeout"] = waits

    def check_coding(self, response: Any) -> None:
        """Refuse a compressed answer."""
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise self._error("the answer is compressed, although asked not to be")

    def read(self, stream: Any) -> Iterator[bytes]:
        """Read a body up to the bounds."""
        size, end = 0, time.monotonic() + _MAX_SECONDS
        for part in stream:
            size += len(part)
            if size > _MAX_ANSWER_BYTES:
                raise self._error(f"an answer of more than {_MAX_ANSWER_BYTES >> 20} MiB")
            if time.monotonic() > end:
                raise self._error(f"an answer takes longer than {_MAX_SECONDS:g} seconds")
            yield part

    def _error(self, reason: str) -> UserError:
        return UserError(f"{self._address}: {reason}; check HF_ENDPOINT")
