"""The queue of a server: its limits, clients that leave, and models that fail."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.served import Served, served
from tokamake.inference.engine import InferenceEngine

LONG = {"prompt": "The", "max_tokens": 40, "temperature": 0, "stop": None}


class Slow:
    """Lets the steps of an engine wait for the test."""

    def __init__(self, engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go, self.step = threading.Event(), engine.step
        monkeypatch.setattr(engine, "step", self._step)

    def _step(self) -> Any:
        assert self.may_go.wait(60)
        return self.step()


@contextmanager
def slow_server(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch, **limits: Any
) -> Iterator[tuple[Served, Slow]]:
    with served({"tiny": tiny}, sampled / "tokenizer", **limits) as running:
        slow = Slow(running.server.models[0].engine, monkeypatch)
        try:
            yield running, slow
        finally:
            slow.may_go.set()


def await_(condition: Callable[[], bool]) -> None:
    """Return once a condition holds."""
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition never held")


def test_clients_that_leave_free_their_places(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_server(tiny, sampled, monkeypatch, batch_size=1) as (running, slow):
        engine = running.server.models[0].engine
        for body in (LONG, {**LONG, "stream": True}, {**LONG, "n": 3}):
            connection = running.connection()
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            await_(lambda: running.server.num_pending > 0)
            connection.close()
        slow.may_go.set()
        await_(lambda: running.server.num_pending == 0)
        await_(lambda: engine.num_active == engine.num_waiting == 0)
        assert running.complete(prompt="The", max_tokens=2)["choices"]


def test_a_full_queue_refuses_more(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_server(tiny, sampled, monkeypatch, batch_size=1, max_queue=2) as (running, slow):
        body = {"prompt": "The", "max_tokens": 1, "n": 4}
        message = running.refusal("/v1/completions", body)
        assert message == "n: 4 sequences, but the server takes 3 at once; ask for fewer"
        replies: list[Any] = []
        waiting = threading.Thread(
            target=lambda: replies.append(running.complete(**{**body, "n": 3}))
        )
        waiting.start()
        await_(lambda: running.server.num_pending == 3)
        refused = running.ask("POST", "/v1/completions", {**body, "n": 1})
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        slow.may_go.set()
        waiting.join()
        assert len(replies[0]["choices"]) == 3
        assert running.complete(**{**body, "n": 3})["choices"]


def test_a_request_that_takes_too_long_ends(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_server(tiny, sampled, monkeypatch, max_seconds=1) as (running, slow):
        threading.Timer(2, slow.may_go.set).start()
        refused = running.ask("POST", "/v1/completions", LONG)
        assert refused.status == 503
        assert refused.json["message"] == "the request takes longer than 1 s; ask for less"
        slow.may_go.clear()
        threading.Timer(2, slow.may_go.set).start()
        reply = running.ask("POST", "/v1/completions", {**LONG, "stream": True})
        assert reply.status == 200
        assert b'"code":"timeout"' in reply.content
        assert b"[DONE]" not in reply.content
        await_(lambda: running.server.num_pending == 0)


def test_beam_searches_and_sequences_run_in_the_order_in_which_they_came(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_server(tiny, sampled, monkeypatch) as (running, slow):
        greedy = {"prompt": "The", "max_tokens": 20, "temperature": 0}
        replies: dict[int, Any] = {}

        def sample(number: int) -> None:
            replies[number] = running.complete(**greedy)["choices"]

        def beam(number: int) -> None:
            body = {"prompts": ["def "], "tokens_to_generate": 5, "beam_width": 2}
            replies[number] = running.ask("PUT", "/api", body).json["scores"]

        # No sequence overtakes a search that came before it, and no search a sequence.
        works = [sample, beam, beam, sample, beam]
        threads = []
        for number, work in enumerate(works):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            await_(lambda number=number: running.server.num_pending == number + 1)
        ended = _order_of_ends(running, monkeypatch)
        slow.may_go.set()
        for thread in threads:
            thread.join()
        assert ended == ["sequence", "search", "search", "sequence", "search"]
        assert replies[0] == replies[3] == running.complete(**greedy)["choices"]
        assert replies[1] == replies[2] == replies[4]


def _order_of_ends(running: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of works, which are added as they end."""
    ended, engine = list[str](), running.server.models[0].engine
    step, search = engine.step, engine.search

    def noted_step() -> Any:
        advanced = step()
        ended.extend("sequence" for each in advanced if each.finish)
        return advanced

    def noted_search(*arguments: Any, **options: Any) -> Any:
        ended.append("search")
        return search(*arguments, **options)

    monkeypatch.setattr(engine, "step", noted_step)
    monkeypatch.setattr(engine, "search", noted_search)
    return ended


def test_work_that_waits_for_a_search_ends_when_its_client_leaves(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_server(tiny, sampled, monkeypatch) as (running, slow):
        bodies = [
            ("POST", "/v1/completions", LONG),
            ("PUT", "/api", {"prompts": ["a"], "tokens_to_generate": 5, "beam_width": 2}),
            ("POST", "/v1/completions", LONG),
        ]
        connections = []
        for number, (method, path, body) in enumerate(bodies, 1):
            connections.append(running.connection())
            headers = {"Content-Type": "application/json"}
            connections[-1].request(method, path, json.dumps(body), headers)
            await_(lambda number=number: running.server.num_pending == number)
        slow.may_go.set()
        for connection in connections[1:]:
            connection.close()
        assert connections[0].getresponse().status == 200
        await_(lambda: running.server.num_pending == 0)
        connections[0].close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_model_fails_the_requests(tiny: Path, sampled: Path, *, stream: bool) -> None:
    def broken() -> Any:
        raise RuntimeError("broken")

    threading.excepthook, before = lambda _: None, threading.excepthook
    try:
        with served({"tiny": tiny}, sampled / "tokenizer") as running:
            running.server.models[0].engine.step = broken
            reply = running.ask("POST", "/v1/completions", {**LONG, "stream": stream})
            assert b"the server has failed; its log says why" in reply.content
            assert reply.status == (200 if stream else 500)
            later = running.ask("POST", "/v1/completions", LONG)
            assert (later.status, later.json["message"]) == (500, "the server stops")
    finally:
        threading.excepthook = before


@pytest.fixture(scope="module")
def half_broken(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model `tiny`, whose embedding of token 399 is NaN."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][399] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_logits_that_are_not_finite_fail_their_request_alone(
    tiny: Path, half_broken: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = "broken: its predictions are not finite; train or export it again"
    bad = {"model": "broken", "prompt": [5] * 30 + [399], "max_tokens": 20}
    search = {"prompts": ["The"], "tokens_to_generate": 2, "beam_width": 2}
    with served({"broken": half_broken, "tiny": tiny}, sampled / "tokenizer") as running:
        expected = [running.complete(**LONG, model=name) for name in ("broken", "tiny")]
        replies: list[Any] = []

        def ask(name: str) -> None:
            replies.append(running.complete(**LONG, model=name))

        threads = [threading.Thread(target=ask, args=(name,)) for name in ("broken", "tiny") * 3]
        for thread in threads:
            thread.start()
        for extra in ({}, {"echo": True, "logprobs": 2}, {"top_p": 0.5}, {"n": 3}):
            assert running.refusal("/v1/completions", bad | extra, status=500) == failure
        streamed = running.ask("POST", "/v1/completions", {**bad, "stream": True})
        assert failure.encode() in streamed.content
        for thread in threads:
            thread.join()
        texts = {each["choices"][0]["text"] for each in replies}
        assert texts == {each["choices"][0]["text"] for each in expected}
        # Beam search takes no token ids.
        broken = running.server.models[0]
        with monkeypatch.context() as patched:
            patched.setattr(type(broken), "encode", lambda *_, **__: [5, 399])
            assert running.refusal("/api", search, method="PUT", status=500) == failure
        assert running.ask("PUT", "/api", search).status == 200


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_failing_search_ends_the_server_only_if_it_has_several_ranks(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch, *, num_ranks: int
) -> None:
    """The other ranks may wait for a call that never comes, so that the server could only hang."""

    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(InferenceEngine, "num_ranks", num_ranks)
    with served({"tiny": tiny}, sampled / "tokenizer") as running:
        running.server.models[0].engine.search = broken
        body = {"prompts": ["a"], "tokens_to_generate": 5, "beam_width": 2}
        reply = running.ask("PUT", "/api", body)
        assert (reply.status, "broken" in reply.json["message"]) == (500, True)
        later = running.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert later.status == (200 if num_ranks == 1 else 500)


def test_a_step_that_needs_too_much_memory_fails_its_requests_alone(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served({"tiny": tiny}, sampled / "tokenizer") as running:
        engine = running.server.models[0].engine
        expected = running.complete(**LONG, seed=3)
        with monkeypatch.context() as patched:
            error = torch.OutOfMemoryError("out of memory")
            patched.setattr(engine, "_begin", lambda *_: (_ for _ in ()).throw(error))
            # The first failure cancels the others of its request.
            body = {**LONG, "prompt": [[5] * 60] * 12, "max_tokens": 2}
            message = running.refusal("/v1/completions", body, status=500)
        assert "too little memory" in message
        await_(lambda: running.server.num_pending == 0)
        searched = {"prompts": ["The"], "tokens_to_generate": 2, "beam_width": 2}
        assert running.ask("PUT", "/api", searched).status == 200
        assert running.complete(**LONG, seed=3)["choices"] == expected["choices"]
        assert running.server.num_pending == 0
