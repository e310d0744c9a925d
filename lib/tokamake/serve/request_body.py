"""Bodies of requests: fields of several kinds of requests, and errors that name a field."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
"""Token ids. An error for each of a million would take seconds."""
Flag = Annotated[bool | None, Field(description="true or false")]
ModelName = Annotated[str | None, Field(description="the name of a model of /v1/models")]
_UNION = {"str", "int", "float", "bool"}
"""Types in the places of pydantic's errors, if a value can have several. Others hold - or [."""
_NESTED = {"extra_forbidden": "unknown field", "missing": "missing"}
"""Messages about fields within a value, by pydantic's type of error."""


class Body(BaseModel):
    """A body of a request. Unknown fields and values of other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def descriptions(body: type[BaseModel]) -> dict[str, str]:
    return {name: field.description or "" for name, field in body.model_fields.items()}


class RequestError(Exception):
    """A request that cannot be answered.

    `field`: of the request, or None; `code`: a word for programs, such as model_not_found.
    """

    def __init__(
        self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message if field is None else f"{field}: {message}"
        self.status, self.field, self.code = status, field, code

    @property
    def body(self) -> dict[str, Any]:
        """The reply: `message` for Megatron's clients, `error` for OpenAI's."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"message": self.message, "error": error}


def of_validation(errors: Sequence[Any], descriptions: dict[str, str]) -> RequestError:
    """The first error of pydantic about a body; an unknown field comes before a missing one."""
    places = [[part for part in error["loc"] if part not in ("body", "query")] for error in errors]
    # A misspelt field is unknown, and often makes another one missing.
    number = next(
        (
            number
            for number, (error, place) in enumerate(zip(errors, places, strict=True))
            if error["type"] == "extra_forbidden" and len(place) == 1
        ),
        0,
    )
    error, place = errors[number], places[number]
    if error["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {error['ctx']['error']}")
    if not place:
        return RequestError("the body is not a JSON object; send one, as application/json")
    path = [*takewhile(lambda part: part not in _UNION and not {*"[-"} & {*str(part)}, place)]
    field, remedy = (
        _shown(".".join(map(str, path))),
        descriptions.get(str(place[0]), "another value"),
    )
    if len(path) > 1 and error["type"] in _NESTED:
        return RequestError(f"{_NESTED[error['type']]}; give {remedy}", field=field)
    if error["type"] == "extra_forbidden":
        names = ", ".join(descriptions)
        return RequestError(f"unknown field; the fields are {names}", field=field)
    if error["type"] == "missing":
        return RequestError("missing; add it", field=field)
    return RequestError(f"{_shown(ascii(error['input']))}: give {remedy}", field=field)


def _shown(text: str) -> str:
    """Beginning of a long text."""
    return text if len(text) <= 60 else text[:57] + "..."
