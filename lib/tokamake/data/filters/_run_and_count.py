"""Run filters on blocks of documents, and count their verdicts."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake.config.filters import check_filter_packages, filter_class, source_digest
from tokamake.data.filters import Document, DocumentFilter, Drop
from tokamake.data.filters._samples import NUM_SAMPLES, Sampled, VerdictSamples, candidates
from tokamake.data.filters._time_limit import TimeLimit, TimeLimitExceeded
from tokamake.data.readers import Input, RecordBlock, select_texts, value_of
from tokamake.errors import SignalExit, UserError, naming

TIME_LIMIT = "time limit"
"""Kind of the failures of a filter that was interrupted, in its counts."""

_KEPT, _CHANGED = ("kept", ""), ("changed", "")


class LoadedFilter(NamedTuple):
    """A filter of the config, ready to run."""

    name: str
    options: Mapping[str, Any]
    source: str
    """Hash of the source file of an external filter and of a filter's input files, or empty."""
    filter: DocumentFilter


def load_filters(entries: Iterable[Mapping[str, Any]]) -> list[LoadedFilter]:
    """Load filters of the config; `setup` is called later, by the process that runs them."""
    entries = [*entries]
    check_filter_packages(entries)
    return [_load(*each) for entry in entries for each in entry.items()]


def _load(name: str, options: Mapping[str, Any]) -> LoadedFilter:
    with naming(f"filter {name}"):
        return LoadedFilter(
            name, options, source_digest(name, options), filter_class(name)(**options)
        )


def set_up(filters: Iterable[LoadedFilter]) -> None:
    """Call `setup` of filters: it may load models."""
    for loaded in filters:
        try:
            loaded.filter.setup()
        except UserError as error:
            raise UserError(f"filter {loaded.name}: {error}") from None
        except SignalExit:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(
                f"filter {loaded.name}: setup failed ({type(error).__name__}: {error}); fix the "
                "filter"
            ) from None


class _Metadata(Mapping[str, Any]):
    """Fields of a record of a block, which is parsed when a filter asks for one."""

    def __init__(self, records: Sequence[Any], index: int) -> None:
        self._records, self._index = records, index

    def __getitem__(self, key: str) -> Any:
        try:
            return value_of(self._record(), key)
        except KeyError:
            raise KeyError(f"no field {key}, or metadata_keys does not name it") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._record())

    def __len__(self) -> int:
        return len(self._record())

    def _record(self) -> dict[str, Any]:
        if not isinstance(self._records, list):  # a lazy sequence parses a record at each access
            self._records, self._index = [self._records[self._index]], 0
        record: dict[str, Any] = self._records[self._index]
        return record


class _FilterError(Exception):
    """A filter failed on a document; the message has no place."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
        """Class of the error, or `TIME_LIMIT`."""


class FilterRun:
    """Filters of a shard, with the counts of their verdicts."""

    def __init__(
        self,
        filters: Sequence[LoadedFilter],
        *,
        seconds: float = 0,
        num_samples: int = NUM_SAMPLES,
    ) -> None:
        """Prepare to run.

        Args:
            seconds: time limit of a document; 0: none.
            num_samples: samples of each verdict of a filter.
        """
        self._filters = filters
        self._limit = TimeLimit(seconds)
        self._counts: list[dict[str, Any]] = [
            {
                "filter": loaded.name,
                "options": dict(loaded.options),
                **({"source": loaded.source} if loaded.source else {}),
                **{"documents": 0, "changed": {}, "dropped": {}, "metrics": {}},
            }
            for loaded in filters
        ]
        self._samples = [VerdictSamples(num_samples) for _ in filters]
        self.dropped = 0

    @property
    def metadata_keys(self) -> tuple[str, ...]:
        keys = (key for loaded in self._filters for key in loaded.filter.metadata_keys)
        return tuple(dict.fromkeys(keys))

    @property
    def counts(self) -> list[dict[str, Any]]:
        """Counts of each filter, and samples of its verdicts, for the manifest."""
        return [
            {**counts, "samples": samples.chosen()}
            for counts, samples in zip(self._counts, self._samples, strict=True)
        ]

    def apply(
        self,
        columns: tuple[Sequence[str], ...],
        block: RecordBlock,
        *,
        indices: NDArray[np.int64],
        source: Input,
        on_failure: Callable[[int, str], None],
    ) -> tuple[tuple[Sequence[str], ...], NDArray[np.int64]]:
        """Filter the documents of a block that have the given indices in it.

        Returns the texts of the kept documents, and their indices. `on_failure` gets the index of a
        document on which a filter failed, and the reason with its remedy.
        """
        kept: list[int] = []
        changed: list[dict[int, str]] = [{} for _ in columns]
        num_failed = 0
        documents = candidates(source, block)
        rows = zip(indices.tolist(), zip(*columns, strict=True), strict=True)
        with self._limit.watch():
            for position, (index, before) in enumerate(rows):
                texts = [*before]
                try:
                    is_kept = self._pass(
                        texts, _Metadata(block.records, index), documents=documents, index=index
                    )
                except _FilterError as error:
                    num_failed += 1
                    on_failure(index, str(error))
                    continue
                if not is_kept:
                    continue
                kept.append(position)
                for changes, text, old in zip(changed, texts, before, strict=True):
                    if text is not old:
                        changes[position] = text
        self.dropped += len(indices) - len(kept) - num_failed
        filtered = (
            select_texts(column, kept, changed=changes)
            for column, changes in zip(columns, changed, strict=True)
        )
        return tuple(filtered), indices[kept]

    def _pass(
        self, texts: list[str], metadata: Mapping[str, Any], *, documents: Sampled, index: int
    ) -> bool:
        """Whether all filters keep a document; replaces its changed texts.

        An empty document passes without a verdict: the manifest counts it as empty.
        """
        if not any(texts):
            for counts in self._counts:
                counts["documents"] += 1
            return True
        hashed = documents.hashes[index]
        stages = zip(self._filters, self._counts, self._samples, strict=True)
        for loaded, counts, samples in stages:
            counts["documents"] += 1
            num_characters = sum(map(len, texts))
            before, after = texts[0], None
            for column, text in enumerate(texts):
                document = Document(text, metadata)
                try:
                    verdict = self._verdict(loaded, document, number=index)
                except _FilterError as error:
                    failures = counts.setdefault("quarantined", {})
                    _add(failures.setdefault(error.kind, {}), characters=num_characters)
                    raise
                for metric, measured in document.metrics.items():
                    _add(counts["metrics"].setdefault(metric, {}), value=measured)
                if verdict is not None:
                    reason, value = verdict
                    sums = counts["dropped"].setdefault(reason, {})
                    _add(sums, characters=num_characters, value=value)
                    if samples.wants(hashed, kind := ("dropped", reason)):
                        samples.add(documents, index, kind, texts=(text, None), value=value)
                    return False
                if document.text is not text and document.text != text:
                    texts[column] = document.text
                    before, after = (text, document.text) if after is None else (before, after)
            if after is not None:
                _add(counts["changed"], characters=num_characters - sum(map(len, texts)))
            kind = _KEPT if after is None else _CHANGED
            if samples.wants(hashed, kind):
                samples.add(documents, index, kind, texts=(before, after))
        return True

    def _verdict(self, loaded: LoadedFilter, document: Document, *, number: int) -> Drop | None:
        """Apply a filter, and check its result: it may be anybody's code."""
        text = document.text
        try:
            self._limit.running = number
            try:
                verdict = loaded.filter.apply(document)
            finally:
                self._limit.running = -1
            _check_result(verdict, document)
            if document.text is not text:
                document.text.encode()  # a text without lone surrogates
            document.metrics = {_utf8(k): _finite(v) for k, v in document.metrics.items()}
            if verdict is None:
                return None
            value = None if verdict.value is None else _finite(verdict.value)
            return Drop(_utf8(verdict.reason), value)
        except TimeLimitExceeded:
            raise _FilterError(
                f"filter {loaded.name} ran longer than filter_seconds {self._limit.seconds:g}; fix "
                "the filter or raise filter_seconds",
                TIME_LIMIT,
            ) from None
        except (MemoryError, SignalExit):
            raise  # not the document's fault
        except (Exception, SystemExit) as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise _FilterError(
                f"filter {loaded.name} failed ({message.removesuffix(':')}); fix the filter",
                type(error).__name__,
            ) from None


def _check_result(verdict: Any, document: Document) -> None:
    """Refuse what filters of other programs return, such as True and False."""
    if verdict is not None and not isinstance(verdict, Drop):
        raise TypeError(
            f"apply returned {verdict!r:.40}; return None to keep a document, or Drop(reason, "
            "number)"
        )
    if not isinstance(document.text, str):
        raise TypeError(f"document.text is {document.text!r:.40}; assign a text")


def _utf8(text: str) -> str:
    str.encode(text)
    return text


def _finite(value: float) -> float:
    """Return a number that JSON has; numbers of numpy become Python's."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number to count")
    return value if isinstance(value, int | float) else float(value)


def _add(sums: dict[str, Any], **numbers: float | None) -> None:
    """Count a document, and add its numbers, if there are any."""
    for name, number in {"documents": 1, **numbers}.items():
        if number is not None:
            sums[name] = sums.get(name, 0) + number
