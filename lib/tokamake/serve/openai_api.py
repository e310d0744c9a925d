"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`, as in OpenAI's API."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tokamake.errors import UserError
from tokamake.inference.chat import chat_prompt
from tokamake.inference.engine import Generation
from tokamake.inference.sampling_settings import prompt_seed
from tokamake.inference.text_stream import TextStream
from tokamake.serve.engine_loop import Continuation
from tokamake.serve.model_server import ModelServer, Submission
from tokamake.serve.openai_replies import ChatStyle, Choice, Style, TextStyle
from tokamake.serve.openai_requests import ChatRequest, CompletionRequest, OpenAIRequest
from tokamake.serve.request_body import RequestError, TokenIds
from tokamake.serve.served_model import ServedModel


class _OpenAIAnswer:
    """Answer of a request: all at once, or in parts; `num_alternatives` None: no scores."""

    def __init__(
        self,
        server: ModelServer,
        style: Style,
        *,
        prompts: Sequence[TokenIds],
        max_new_tokens: Sequence[int],
        num_alternatives: int | None,
        scores_prompt: bool = False,
    ) -> None:
        self._server, self._style, self._prompts = server, style, prompts
        body: OpenAIRequest = style.body
        if body.stream_options is not None and not body.stream:
            raise RequestError("set stream to true, too", field="stream_options")
        model, seed = style.model, body.seed
        if seed is None:
            seed = secrets.randbits(64)
        stop_tokens = body.stop_token_ids or []
        model.check_tokens(stop_tokens, field="stop_token_ids")
        ends = frozenset() if body.ignore_eos else model.end_tokens
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        model.check_tokens([*bias], field="logit_bias")
        decode = model.decoder(skips_special=bool(body.skip_special_tokens))
        self._choices: list[Choice] = []
        seen: Counter[tuple[int, ...]] = Counter()
        for prompt, limit in zip(prompts, max_new_tokens, strict=True):
            if (least := body.min_tokens or 0) > limit:
                message = f"{least}: more than the most new tokens, {limit}; give less"
                raise RequestError(message, field="min_tokens")
            text, repeated = model.tokenizer.decode(prompt), seen[tuple(prompt)]
            seen[tuple(prompt)] += 1
            for sample in range(body.num_choices):
                repetition = repeated * body.num_choices + sample
                generation = Generation(
                    prompt,
                    replace(body.sampling, seed=prompt_seed(seed, text, repetition=repetition)),
                    limit,
                    end_tokens=ends.union(stop_tokens),
                    bias=bias,
                    min_new_tokens=least,
                    num_alternatives=num_alternatives,
                    scores_prompt=scores_prompt,
                )
                new_text = TextStream(decode, prompt, stops=body.stops, num_unstopped=least)
                continuation = Continuation(
                    model, generation, text=new_text, is_streamed=bool(body.stream)
                )
                texts = TextStream(model.tokenizer.decode, prompt)
                self._choices.append(Choice(len(self._choices), continuation, texts=texts))
        self._head = {
            "id": f"{style.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model.name,
        }

    async def respond(self, request: Request) -> Response:
        """Continue the prompts and reply."""
        works = [choice.continuation for choice in self._choices]
        submission = self._server.submit(request, works, field="n")
        if self._style.body.stream:
            return StreamingResponse(self._events(submission), media_type="text/event-stream")
        await submission.ended()
        choices = [await self._composed(self._style.choice, choice) for choice in self._choices]
        head = {**self._head, "object": self._style.object}
        return JSONResponse({**head, "choices": choices, "usage": self._usage})

    async def _events(self, submission: Submission) -> AsyncIterator[bytes]:
        head = {**self._head, "object": self._style.chunk_object}
        options = self._style.body.stream_options
        usage: dict[str, Any] = {"usage": None} if options and options.include_usage else {}
        try:
            async for number in submission.changes():
                choice = self._choices[number]
                text, tokens = choice.news()
                if text or choice.finish:
                    compose = partial(self._style.chunk, text=text, tokens=tokens)
                    chunk = await self._composed(compose, choice)
                    yield _event({**head, "choices": [chunk], **usage})
            if usage:
                yield _event({**head, "choices": [], "usage": self._usage})
            yield b"data: [DONE]\n\n"
        except RequestError as error:  # the status is sent already
            yield _event(error.body)
        except Exception:
            yield _event(RequestError("the server has failed; its log says why", status=500).body)
            raise

    async def _composed(
        self, compose: Callable[[Choice], dict[str, Any]], choice: Choice
    ) -> dict[str, Any]:
        """A choice or a part of it."""
        is_short = not getattr(self._style.body, "echo", None)
        if choice.is_begun or (
            is_short and choice.continuation.generation.num_alternatives is None
        ):
            return compose(choice)
        # Texts of a whole prompt's tokens take so long that other requests would wait.
        return await asyncio.to_thread(compose, choice)

    @property
    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._prompts))
        new = sum(len(choice.tokens) for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


def openai_routes(server: ModelServer) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        """The models that the server serves."""
        return {"object": "list", "data": [model.describe() for model in server.models]}

    @routes.get("/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        """One of the models."""
        return server.model(name).describe()

    @routes.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        model = server.model(body.model)
        if body.best_of not in (None, body.num_choices):
            raise RequestError(f"{body.best_of}: give the value of n, or nothing", field="best_of")
        server.check_number(len(body.prompts) * body.num_choices, field="n")
        prompts = await asyncio.to_thread(_prompts, model, body)
        limits = [_limit(model, prompt, body=body) for prompt in prompts]
        for prompt, limit in zip(prompts, limits, strict=True):
            model.check_length(prompt, limit, field="max_tokens")
        answer = _OpenAIAnswer(
            server,
            TextStyle(model, body),
            prompts=prompts,
            max_new_tokens=limits,
            num_alternatives=body.logprobs,
            scores_prompt=bool(body.echo) and body.logprobs is not None,
        )
        return await answer.respond(request)

    @routes.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation, where the tokenizer has a chat template."""
        model = server.model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("set logprobs to true, too", field="top_logprobs")
        prompt = await asyncio.to_thread(_chat_tokens, model, body)
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        limit = body.max_completion_tokens or body.max_tokens or _room(model, prompt)
        model.check_length(prompt, limit, field=name)
        answer = _OpenAIAnswer(
            server,
            ChatStyle(model, body),
            prompts=[prompt],
            max_new_tokens=[limit],
            num_alternatives=(body.top_logprobs or 0) if body.logprobs else None,
        )
        return await answer.respond(request)

    return routes


def _chat_tokens(model: ServedModel, body: ChatRequest) -> TokenIds:
    variables, continues = body.chat_template_kwargs or {}, bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "true: leave it out with continue_final_message"
        raise RequestError(message, field="add_generation_prompt")
    for name in sorted({"messages", "chat_template", "tokenize"} & {*variables}):
        raise RequestError("no variable of the chat template", field=f"chat_template_kwargs.{name}")
    try:
        text = chat_prompt(
            model.tokenizer,
            [message.described for message in body.messages],
            add_generation_prompt=not continues and body.add_generation_prompt is not False,
            continue_final_message=continues,
            variables=variables,
        )
    except UserError as error:
        raise RequestError(str(error).removeprefix("messages: "), field="messages") from None
    return model.encode(text, field="messages")


def _prompts(model: ServedModel, body: CompletionRequest) -> list[TokenIds]:
    return [
        model.encode(prompt, field="prompt", adds_bos=body.add_special_tokens is not False)
        if isinstance(prompt, str)
        else model.check(prompt, field="prompt")
        for prompt in body.prompts
    ]


def _limit(model: ServedModel, prompt: Sequence[int], *, body: CompletionRequest) -> int:
    """Most new tokens of a prompt; by default no more than the context has room for."""
    room = _room(model, prompt)
    if body.max_tokens is None:
        return room
    return body.max_tokens if "max_tokens" in body.model_fields_set else min(body.max_tokens, room)


def _room(model: ServedModel, prompt: Sequence[int]) -> int:
    return model.max_length - len(prompt)
