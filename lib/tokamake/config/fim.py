"""Settings of fill-in-the-middle."""

from typing import Annotated

from pydantic import Field

from tokamake.config.fields import Settings


class FimSettings(Settings):
    """Fill-in-the-middle (FIM): rearrange documents so that the model learns to fill gaps."""

    rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of documents to rearrange; 0 turns fill-in-the-middle off."""
    spm_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the rearranged documents in the order suffix, prefix, middle (SPM). The others have
    the order prefix, suffix, middle (PSM)."""
    split_token: str = ""
    """Special token between fragments of a document, for example between files of a repository.
    Empty: documents have no fragments."""
    fragment_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of fragments to rearrange, each fragment separately."""
    prefix: str = "<fim_prefix>"
    """Special token before the prefix."""
    suffix: str = "<fim_suffix>"
    """Special token before the suffix."""
    middle: str = "<fim_middle>"
    """Special token before the middle."""
