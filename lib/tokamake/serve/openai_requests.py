"""Bodies of requests in the format of OpenAI's API."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tokamake.inference.sampling_settings import Sampling
from tokamake.serve.request_body import Body, Flag, ModelName, TokenIds

_MAX_CHOICES = 128
_STOPS = "a text, or a list of at most 16; each has 1 to 1000 characters"
_Ignored = Annotated[str | None, Field(description="a text, which is ignored")]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_Penalty = Annotated[float | None, Field(ge=-2, le=2, description="a number from -2 to 2")]
_NumTokens = Annotated[int | None, Field(ge=0, le=2**31, description="an integer from 0 to 2^31")]
_MaxTokens = Annotated[int | None, Field(ge=1, le=2**31, description="an integer from 1 to 2^31")]
_LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
]
_Prompt = (
    str
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
)
_False = Annotated[Literal[False] | None, Field(description="false or nothing")]


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: Flag = False


class ResponseFormat(Body):
    """Format of a reply."""

    type: Literal["text"]


class OpenAIRequest(Body):
    """Fields of both kinds of completions."""

    model: ModelName = None
    temperature: float | None = Field(
        None, ge=0, le=100, description="a number from 0 to 100; by default 1"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="a number above 0, at most 1, which is the default"
    )
    top_k: int | None = Field(
        None, ge=-1, le=2**31, description="an integer: 0 or -1 for all tokens"
    )
    min_p: float | None = Field(None, ge=0, le=1, description="a number from 0 to 1")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="a number from 0.01 to 100"
    )
    n: int | None = Field(None, ge=1, le=_MAX_CHOICES, description="an integer from 1 to 128")
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = Field(
        None, description=_STOPS
    )
    stop_token_ids: Annotated[TokenIds, Field(max_length=64)] | None = Field(
        None, description="a list of at most 64 token ids, or nothing"
    )
    seed: int | None = Field(None, description="an integer")
    stream: Flag = None
    stream_options: StreamOptions | None = Field(
        None, description='an object such as {"include_usage": true}'
    )
    user: _Ignored = None
    # OpenAI's clients may send these; only values without effect are taken.
    store: _False = None
    metadata: dict[str, str] | None = Field(
        None, description="an object of texts, which is ignored"
    )
    service_tier: Literal["auto", "default"] | None = Field(
        None, description="auto, default or nothing"
    )
    safety_identifier: _Ignored = None
    prompt_cache_key: _Ignored = None
    response_format: ResponseFormat | None = Field(
        None, description='{"type": "text"} or nothing: no other is forced'
    )
    # vLLM's clients send these; here, too, only values without effect are taken.
    use_beam_search: Literal[False] | None = Field(
        None, description="false or nothing; PUT /api searches beams"
    )
    include_stop_str_in_output: _False = None
    spaces_between_special_tokens: Literal[True] | None = Field(None, description="true or nothing")
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    logit_bias: _LogitBias | None = Field(
        None, description="an object of at most 1024 token ids and numbers from -100 to 100"
    )
    ignore_eos: Flag = None
    min_tokens: _NumTokens = None
    skip_special_tokens: Flag = None

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen; the seed is replaced."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
        )

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(OpenAIRequest):
    """Body of `/v1/completions`."""

    prompt: _Prompt = Field(description="a text, token ids, or a list of these that is not empty")
    max_tokens: _NumTokens = 16
    echo: Flag = None
    logprobs: int | None = Field(None, ge=0, le=20, description="an integer from 0 to 20")
    add_special_tokens: bool | None = Field(
        True, description="true, for the token that begins texts, or false"
    )
    best_of: int | None = Field(None, description="the value of n, or nothing")
    suffix: None = Field(None, description="nothing: the model only continues")

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TextPart(Body):
    """A part of the content of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """A message of a conversation."""

    role: str = Field(min_length=1)
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None
    name: str | None = None

    @property
    def described(self) -> dict[str, str]:
        """The message for a chat template; a line end joins the parts of its content."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **name}


class ChatRequest(OpenAIRequest):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(
        min_length=1, description='a list of {"role": "user", "content": "a text"}'
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="an object of variables of the chat template"
    )
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    modalities: list[Literal["text"]] | None = Field(None, description='["text"] or nothing')
    tools: list[None] | None = Field(None, max_length=0, description="an empty list or nothing")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="none, auto or nothing")
    parallel_tool_calls: Flag = None
    max_tokens: _MaxTokens = None
    max_completion_tokens: _MaxTokens = None
    logprobs: Flag = None
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="an integer from 0 to 20, with logprobs: true"
    )
