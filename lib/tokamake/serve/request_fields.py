"""Fields that requests of several kinds share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
"""Token ids. An error for each of a million would take seconds."""
Temperature = Annotated[
    float | None, Field(ge=0, le=100, description="a number from 0 to 100; by default 1")
]
TopP = Annotated[
    float | None, Field(gt=0, le=1, description="a number above 0, at most 1, which is the default")
]
Penalty = Annotated[float | None, Field(ge=-2, le=2, description="a number from -2 to 2")]


class Body(BaseModel):
    """A body of a request. Unknown fields and values of other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def descriptions(body: type[BaseModel]) -> dict[str, str]:
    return {name: field.description or "" for name, field in body.model_fields.items()}
