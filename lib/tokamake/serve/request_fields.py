"""Fields that requests of several kinds share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
"""Token ids. An error for each of a million would take seconds."""
Flag = Annotated[bool | None, Field(description="true or false")]
ModelName = Annotated[str | None, Field(description="the name of a model of /v1/models")]


class Body(BaseModel):
    """A body of a request. Unknown fields and values of other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def descriptions(body: type[BaseModel]) -> dict[str, str]:
    return {name: field.description or "" for name, field in body.model_fields.items()}
