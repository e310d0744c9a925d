"""Tool `trace-sample`: the raw lines behind a row of a training step."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.errors import UserError
from tokamake.runtime.console import counted

if TYPE_CHECKING:
    from tokamake.data.samples.fim.samples import FimSamples, TracedSample
    from tokamake.data.samples.loader import DocumentSpan, SplitSamples


def trace_sample(run: Path, step: int, row: int, /, *, token: int | None = None) -> None:
    """Find the raw lines behind a row of a training step.

    Tokens are listed in the order that the model sees, also if train.fim rearranges documents.

    Args:
        run: folder of the training run, or the run.yaml in it.
        step: training step, from 1, as in the logs.
        row: row of the step's global batch, from 0.
        token: only this token of the row, from 0; the token after the last input is its label.
    """
    from tokamake.config.objective import objective_data
    from tokamake.config.resolved_run import read_run
    from tokamake.data.samples.fim.samples import training_samples
    from tokamake.train.trace.trained_spans import trained_spans

    run = run / "run.yaml" if run.is_dir() else run
    settings = read_run(run)
    if not objective_data(settings.train.objective).generates:
        raise UserError(
            f"{run}: train.objective: {settings.train.objective}: only samples of models that "
            "predict the next token can be traced; give the run of another model"
        )
    parts = trained_spans(settings)
    _check(run, name="step", value=step, choices=range(1, parts[-1].last_step + 1))
    part = next(part for part in parts if step <= part.last_step)
    if part.samples == "changed":
        raise UserError(
            f"{run}: step {step}: trained before the data changed, at step {part.last_step}: its "
            f"samples came from an index that is gone; give a step after {part.last_step}"
        )
    sizes = part.sizes
    if sizes is None:
        raise UserError(
            f"{run}: step {step}: no checkpoint with its batch size is left; give a step after "
            f"{parts[-2].last_step}"
        )
    consumed = sizes.samples(step - 1)
    _check(run, name="row", value=row, choices=range(sizes.at(consumed)))
    _check(run, name="token", value=token or 0, choices=range(settings.train.sequence_length + 1))
    samples = training_samples(settings)
    sample = consumed + row
    if part.samples == "perhaps changed":
        print(
            f"step {step}: trained before the length of the run changed, at step {part.last_step}: "
            "its samples may have been different"
        )
    print(f"step {step}, row {row}: sample {sample}, of corpus {samples.corpus_of(sample)}")
    traced, spans = _trace(samples, sample), samples.spans(sample)
    # Cached: an end-of-document token or a mark splits a span into several ranges.
    locate = cache(lambda span: _locate(settings.data_root, span))
    for token_range in _ranges(traced, spans) if token is None else [range(token, token + 1)]:
        origin = _origin_text(traced, spans, tokens=token_range, locate=locate)
        print(f"{_tokens_text(token_range)} {origin}")
    if traced.left_out and token is None:
        verb = "is" if traced.left_out == 1 else "are"
        print(f"{counted(traced.left_out, 'token')} more did not fit and {verb} left out")


def _check(run: Path, *, name: str, value: int, choices: range) -> None:
    if value not in choices:
        raise UserError(
            f"{run}: {name} {value}: does not exist; give {choices[0]} to {choices[-1]}"
        )


def _trace(samples: "SplitSamples | FimSamples", sample: int) -> "TracedSample":
    import numpy as np

    from tokamake.data.samples.fim.samples import FimSamples, TracedSample

    if isinstance(samples, FimSamples):
        return samples.trace(sample)
    row = samples[sample]
    tokens = row["tokens"] if row.dtype.names else row  # objective retro also has neighbors
    return TracedSample(tokens, np.arange(len(tokens)), {}, 0)


def _ranges(traced: "TracedSample", spans: "list[DocumentSpan]") -> "list[range]":
    """Split tokens into ranges: consecutive tokens of a span, padding, or a single mark."""
    import numpy as np

    from tokamake.data.samples.loader import PAD

    origins, padding = traced.origins, traced.tokens == PAD
    stops = np.cumsum([span.stop - span.start for span in spans])
    same_span = np.diff(np.searchsorted(stops, origins, side="right")) == 0
    step = np.diff(origins)
    # A step of 0: text that is encoded again may give several tokens for one.
    continues = (origins[:-1] >= 0) & same_span & (step >= 0) & (step <= 1)
    continues |= padding[:-1] & padding[1:]
    bounds = [0, *(np.flatnonzero(~continues) + 1).tolist(), len(origins)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _tokens_text(tokens: range) -> str:
    if len(tokens) == 1:
        return f"token {tokens[0]}"
    return f"tokens {tokens[0]} to {tokens[-1]}"


def _origin_text(
    traced: "TracedSample",
    spans: "list[DocumentSpan]",
    *,
    tokens: range,
    locate: "Callable[[DocumentSpan], str]",
) -> str:
    """Origin of a range of tokens, or their kind if they have none."""
    first, last = int(traced.origins[tokens[0]]), int(traced.origins[tokens[-1]])
    be, come = ("is", "comes") if len(tokens) == 1 else ("are", "come")
    if first < 0:
        mark = traced.marks.get(int(traced.tokens[tokens[0]]))
        return f"{be} {mark}, inserted by train.fim" if mark else f"{be} padding"
    for span in spans:
        if first < (size := span.stop - span.start):
            break
        first, last = first - size, last - size
    source_tokens = _tokens_text(range(span.start + first, span.start + last + 1))
    return f"{come} from {source_tokens} of {span.prefix} {locate(span)}"


def _locate(data_root: Path, span: "DocumentSpan") -> str:
    """Sequence, document and raw line of a span; no line if its dataset has no sources file."""
    from tokamake.data.indexed.dataset import IndexedDataset
    from tokamake.data.indexed.trace import document_of, origin

    document = document_of(IndexedDataset(data_root / span.prefix), span.sequence)
    numbers = f"sequence {span.sequence}, document {document}"
    try:
        return f"{numbers}: {origin(data_root / span.prefix, document)}"
    except UserError as error:
        return f"{numbers} ({error})"
