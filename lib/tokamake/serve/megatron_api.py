"""`PUT /api`: the text generation server of Megatron-LM, for its clients.

Fields, limits and replies are Megatron's. Unlike there, each bad request has status 400, and a
seed is an integer of any size. As there, beam search uses no field of sampling. `add_BOS`
adds the tokenizer's BOS, and the end-of-document token only where it has none.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from tokamake.inference.beams import TokenRules
from tokamake.inference.engine import Generation
from tokamake.inference.sampling_settings import BeamSettings, Sampling, prompt_seed
from tokamake.inference.text_stream import TextStream
from tokamake.serve.engine_loop import BeamSearch, Continuation
from tokamake.serve.model_server import ModelServer
from tokamake.serve.request_body import Body, Flag, RequestError, TokenIds

_MAX_PROMPTS = 128
_RENAMED = {"max_len": "tokens_to_generate", "sentences": "prompts"}

_Share = Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1; 0: not set")]


class MegatronRequest(Body):
    """Body of `PUT /api`."""

    prompts: list[str] = Field(
        min_length=1, max_length=_MAX_PROMPTS, description="a list of 1 to 128 texts"
    )
    tokens_to_generate: int = Field(64, ge=0, le=2**31, description="an integer from 0 to 2^31")
    logprobs: Flag = False
    temperature: float = Field(1.0, gt=0, le=100, description="a number above 0, at most 100")
    top_k: int = Field(0, ge=0, le=1000, description="an integer from 0 to 1000")
    top_p: _Share = 0.0
    top_p_decay: _Share = 0.0
    top_p_bound: _Share = 0.0
    add_BOS: Flag = False
    stop_on_double_eol: Flag = False
    stop_on_eol: Flag = False
    prevent_newline_after_colon: Flag = False
    random_seed: int | None = Field(None, ge=0, description="an integer of 0 or more, or nothing")
    no_log: bool | None = Field(False, description="true or false; no prompt is ever logged")
    beam_width: int | None = Field(None, ge=1, description="an integer of 1 or more, or nothing")
    stop_token: int | None = Field(
        None, ge=0, description="a token id; by default the model's end tokens"
    )
    length_penalty: float = Field(1.0, ge=-10, le=10, description="a number from -10 to 10")


def check_old_fields(body: Any) -> None:
    """Check that a body has no field that Megatron has renamed."""
    for old, new in _RENAMED.items():
        if isinstance(body, dict) and old in body:
            raise RequestError(f"is no longer used; replace it with {new}", field=old)


def _check(body: MegatronRequest, *, batch_size: int) -> None:
    def refuse(field: str, message: str) -> None:
        raise RequestError(message, field=field)

    if body.tokens_to_generate == 0 and not body.logprobs:
        refuse("tokens_to_generate", "0: only scores prompts; set logprobs to true, too")
    if body.top_k and body.top_p:
        refuse("top_p", "top_k is set, too; set only one of them")
    for name in ("top_p_decay", "top_p_bound"):
        if getattr(body, name) and not body.top_p:
            refuse(name, "has an effect only with top_p; set it, too")
    if body.top_p_bound > body.top_p:
        refuse("top_p_bound", f"{body.top_p_bound}: above top_p; give less")
    if "" in body.prompts and not body.add_BOS:
        refuse("prompts", "one is empty; set add_BOS to true, or give a text")
    if body.beam_width is None:
        return
    if len(body.prompts) > 1:
        refuse("beam_width", f"{len(body.prompts)} prompts; beam search takes one")
    if body.beam_width > batch_size:
        refuse("beam_width", f"{body.beam_width}: the server has {batch_size} places; give less")
    if not body.tokens_to_generate:
        refuse("tokens_to_generate", "0: beam search needs at least 1")


class _MegatronAnswer:
    """Answer of a request."""

    def __init__(self, server: ModelServer, body: MegatronRequest) -> None:
        self._server, self._body, self._model = server, body, server.model(None)
        tokenizer = self._model.tokenizer
        first = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        bos = [first] if body.add_BOS else []
        self._prompts = [
            self._model.check([*bos, *self._tokens(text)], field="prompts") for text in body.prompts
        ]
        for prompt in self._prompts:
            self._model.check_length(prompt, body.tokens_to_generate, field="tokens_to_generate")
        self._ends = self._model.end_tokens
        if body.stop_token is not None:
            self._ends = frozenset(self._model.check([body.stop_token], field="stop_token"))

    def _tokens(self, text: str) -> list[int]:
        return self._model.encode(text, field="prompts") if text else []

    async def sampled(self, request: Request) -> dict[str, Any]:
        """The continuation of each prompt."""
        works = [self._continuation(number) for number in range(len(self._prompts))]
        await self._server.submit(request, works, field="prompts").ended()
        sequences = [[*work.generation.prompt, *work.generation.tokens] for work in works]
        logprobs = None
        if self._body.logprobs:
            logprobs = [
                [
                    score.log_probability
                    for score in (*work.generation.prompt_scores, *work.generation.scores)
                ][: len(sequence) - 1]
                for work, sequence in zip(works, sequences, strict=True)
            ]
        texts = await asyncio.to_thread(self._texts, sequences)
        return {**texts, "logprobs": logprobs}

    def _continuation(self, number: int) -> Continuation:
        body, prompt, text = self._body, self._prompts[number], self._body.prompts[number]
        seed = secrets.randbits(64) if body.random_seed is None else body.random_seed
        repetition = body.prompts[:number].count(text)
        generation = Generation(
            prompt,
            Sampling(
                # One token to draw from is the most likely one.
                temperature=0.0 if body.top_k == 1 else body.temperature,
                top_k=body.top_k,
                top_p=body.top_p or 1.0,
                top_p_decay=body.top_p_decay or 1.0,
                top_p_bound=body.top_p_bound,
                seed=prompt_seed(seed, text, repetition=repetition),
            ),
            body.tokens_to_generate,
            end_tokens=self._ends,
            num_alternatives=0 if body.logprobs else None,
            scores_prompt=bool(body.logprobs),
            forbidden_after=self._newline_after_colon(),
        )
        new_text = TextStream(self._model.tokenizer.decode, prompt)
        continuation = Continuation(self._model, generation, text=new_text, is_streamed=False)
        stop = "\n\n" if body.stop_on_double_eol else "\n" if body.stop_on_eol else None
        if stop:  # unlike a stop text, line ends stay
            continuation.is_wanted_after = _until(stop, continuation, before=text[-1:])
        return continuation

    def _newline_after_colon(self) -> dict[int, int]:
        if not self._body.prevent_newline_after_colon:
            return {}
        colon, newline = self._model.tokenizer.encode_batch([":", "\n"])
        return {colon[-1]: newline[-1]} if colon and newline else {}

    async def searched(self, request: Request) -> dict[str, Any]:
        """All beams of the only prompt, the best one first."""
        body, prompt = self._body, self._prompts[0]
        assert body.beam_width is not None
        beams = BeamSettings(body.beam_width, body.length_penalty)
        work = BeamSearch(
            self._model,
            lambda is_wanted: self._model.engine.search(
                prompt,
                beams,
                max_new_tokens=body.tokens_to_generate,
                rules=TokenRules(self._ends, self._newline_after_colon()),
                is_wanted=is_wanted,
            ),
        )
        await self._server.submit(request, [work], field="beam_width").ended()
        sequences = [[*prompt, *beam.tokens] for beam in work.beams]
        texts = await asyncio.to_thread(self._texts, sequences)
        return {**texts, "scores": [beam.score for beam in work.beams]}

    def _texts(self, sequences: Sequence[TokenIds]) -> dict[str, Any]:
        tokenizer = self._model.tokenizer
        return {
            "text": [tokenizer.decode(sequence) for sequence in sequences],
            "segments": [self._model.token_texts(sequence) for sequence in sequences],
        }


def _until(stop: str, continuation: Continuation, *, before: str) -> Callable[[str], bool]:
    """Function that ends a sequence after the token with a text, which may begin before it."""

    def is_wanted_after(new: str) -> bool:
        length = len(stop) - 1 + len(new)
        tail = f"{before}{continuation.text.text}"[-length:] if length else ""
        return stop not in tail

    return is_wanted_after


def megatron_routes(server: ModelServer) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.put("/api")
    async def api(body: MegatronRequest, request: Request) -> dict[str, Any]:
        """Continue prompts, as the text generation server of Megatron-LM does."""
        _check(body, batch_size=server.limits.batch_size)
        answer = await asyncio.to_thread(_MegatronAnswer, server, body)
        if body.beam_width is not None:
            return await answer.searched(request)
        return await answer.sampled(request)

    return routes
