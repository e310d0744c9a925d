"""Filters of documents, one file per filter, between the readers and the tokenizer.

A file defines a class `Filter`, derived from `DocumentFilter`. Its fields are its options in the
config, and `apply` decides about one document. Filters run in the order of the config, in one
thread, on the documents of a shard in their order. The same document must always get the same
verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tokamake.config.fields import Settings

if TYPE_CHECKING:
    from tokamake.config.tasks import TaskSettings


class Drop(NamedTuple):
    """The verdict that drops a document."""

    reason: str
    """One of a few texts of the filter: the manifest counts documents by reason. It says what was
    wrong, with the limit: "number of words below 50"."""
    value: float | None = None
    """The number that decided, such as the length. The manifest has its sum by reason."""


def out_of_bounds(
    quantity: str, number: float, *, least: float | None = None, most: float | None = None
) -> Drop | None:
    """Drop a document whose number is below `least` or above `most`; None: no bound."""
    if least is not None and number < least:
        return Drop(f"{quantity} below {least:,.6g}", number)
    if most is not None and number > most:
        return Drop(f"{quantity} above {most:,.6g}", number)
    return None


@dataclass
class Document:
    """A document, as a filter sees it."""

    text: str
    """Assign another text to change the document."""
    metadata: Mapping[str, Any]
    """Fields of the raw record, the text included; a key such as `meta.url` looks into objects."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers about the document. The manifest has their counts and sums."""


class DocumentFilter(Settings):
    """Base class of filters: fields with docstrings are options, `apply` decides."""

    bare_option: ClassVar[str] = ""
    """Option that a value alone sets: "languages" accepts `language: en`. Empty: none."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Optional packages that `setup` or `apply` imports: the dry run looks for them."""

    @property
    def metadata_keys(self) -> tuple[str, ...]:
        """Fields of `Document.metadata` that `apply` reads; tables skip other columns."""
        return ()

    @property
    def input_files(self) -> tuple[Path, ...]:
        """Files that `setup` reads. Manifests have a hash of their contents; if it changes, the
        corpus is tokenized again."""
        return ()

    @classmethod
    def with_tasks(
        cls,
        options: Mapping[str, Any],
        tasks: "Mapping[str, TaskSettings]",  # noqa: ARG003
    ) -> Mapping[str, Any]:
        """Return the options, completed from `evaluate.tasks` of the config, for `tokenize`."""
        return options

    def check_inputs(self) -> None:
        """Check the files that `setup` reads, or their beginning; the dry run calls it.

        UserError: a file is missing or damaged.
        """

    def setup(self) -> None:
        """Load a model or other data for `apply`. Called once per process, before `apply`."""

    def apply(self, document: Document) -> Drop | None:
        """Keep (None), change or drop a document. With several text keys, called for each text."""
        raise NotImplementedError
