"""`/tokenize`, `/detokenize` and `/tokenizer_info`, which lm-eval asks a server for."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from tokamake.serve.model_server import ModelServer
from tokamake.serve.request_fields import AddsBos, Body, ModelName, TokenIds


class TokenizeRequest(Body):
    """Body of `/tokenize`."""

    prompt: Annotated[str, Field(description="a text")]
    model: ModelName = None
    add_special_tokens: AddsBos = False


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    tokens: Annotated[TokenIds, Field(description="a list of token ids")]
    model: ModelName = None


def tokenizer_routes(server: ModelServer) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Special tokens of the first model."""
        tokenizer = server.model(None).tokenizer
        bos = None if tokenizer.bos is None else tokenizer.decode([tokenizer.bos])
        return {
            "eos_token": tokenizer.decode([tokenizer.eod]),
            "bos_token": bos,
            "chat_template": tokenizer.chat_template or None,
        }

    @routes.post("/tokenize")
    def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Tokens of a text."""
        model = server.model(body.model)
        adds_bos = bool(body.add_special_tokens)
        tokens = []
        if body.prompt:
            tokens = model.encode(body.prompt, field="prompt", adds_bos=adds_bos)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": model.max_length}

    @routes.post("/detokenize")
    def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Text of tokens."""
        model = server.model(body.model)
        tokens = model.check(body.tokens, field="tokens") if body.tokens else []
        return {"prompt": model.tokenizer.decode(tokens)}

    return routes
