"""Estimates as text for people."""

from collections.abc import Iterator, Sequence

from tokamake.estimate.data import CorpusEstimate
from tokamake.estimate.run import RunEstimate
from tokamake.estimate.workflow import WorkflowEstimate
from tokamake.runtime.console import counted
from tokamake.units import amount, duration, in_bytes

_SOURCES = {
    "built": "counted: the datasets are built",
    "datasets": "counted: existing datasets",
    "counted": "counted: all of it was read",
    "sampled": "from a sample",
    "assumed": "assumed from file sizes",
}
_TITLE_WIDTH = 11


def full(estimate: WorkflowEstimate) -> list[str]:
    """All lines of an estimate."""
    data = estimate.data
    rows: list[tuple[str, ...]] = [("corpus", "files", "size", "documents", "tokens", "", "")]
    rows += [_corpus_row(corpus) for corpus in data.corpora]
    lines = [*table(rows, left=(0, 5, 6)), ""]
    for title, text in _data_lines(estimate):
        lines.append(f"{title:<{_TITLE_WIDTH}} {text}")
    for run in estimate.runs:
        lines += ["", f"run {run.run}"]
        lines += [f"{title:<{_TITLE_WIDTH}} {text}" for title, text in _run_lines(run, estimate)]
    return lines + ["", *(f"warning: {text}" for text in estimate.warnings)] * bool(
        estimate.warnings
    )


def short(estimate: WorkflowEstimate) -> list[str]:
    """A few lines of an estimate, for the end of a dry run."""
    lines = []
    for run in estimate.runs:
        parts = [f"{amount(run.parameters)} parameters", counted(run.steps, "step")]
        parts.append(f"{amount(run.tokens)} tokens ({_epochs(run)})" if run.epochs else "")
        if run.memory:
            parts.append(f"{in_bytes(round(run.memory.total))} a rank")
        parts.append(f"{run.flops:.1e} FLOPs")
        if run.node_hours is not None:
            parts.append(_node_hours(run.node_hours))
        lines.append(f"run {run.run}: {', '.join(filter(None, parts))}")
    lines = _first(lines, "run")
    needed, free = round(estimate.needed_bytes), estimate.free_bytes
    lines.append(f"disk: about {in_bytes(needed)} more, {in_bytes(free)} free")
    return lines + _first([f"warning: {text}" for text in estimate.warnings], "warning")


def _first(lines: list[str], noun: str) -> list[str]:
    """The first eight lines, and how many more there are."""
    rest = [f"and {counted(len(lines) - 8, noun)} more"] if len(lines) > 8 else []
    return lines[:8] + rest


def table(rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> list[str]:
    """Rows with aligned columns: right-aligned, but for the columns `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if index in left else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _corpus_row(corpus: CorpusEstimate) -> tuple[str, ...]:
    is_sampled = corpus.source == "sampled"
    about = "about " if is_sampled or corpus.source == "assumed" else ""
    error = "± ?" if is_sampled else ""
    if corpus.error and corpus.tokens:
        error = f"± {corpus.error / corpus.tokens:.1%}"
    return (
        corpus.corpus,
        f"{corpus.files:,}",
        in_bytes(corpus.raw_bytes) if corpus.raw_bytes else "?",
        f"{corpus.documents:,.0f}" if corpus.documents else "?",
        f"{about}{corpus.tokens:,.0f}",
        error,
        _SOURCES[corpus.source],
    )


def _data_lines(estimate: WorkflowEstimate) -> Iterator[tuple[str, str]]:
    data = estimate.data
    shards = f"{counted(data.shards, 'shard')} in {counted(data.tokenize_jobs, 'job')}"
    merged = f"{counted(data.merged, 'merged file')} in {counted(data.merge_jobs, 'job')}"
    yield "data", f"{shards}, {merged}"
    sizes = {
        "shards": data.shards_bytes,
        "merged": data.merged_bytes,
        "checkpoints": sum(run.checkpoints_bytes for run in estimate.runs),
    }
    parts = ", ".join(f"{name} {in_bytes(round(size))}" for name, size in sizes.items())
    yield "disk", f"{parts}; {in_bytes(estimate.free_bytes)} free"


def _run_lines(run: RunEstimate, estimate: WorkflowEstimate) -> Iterator[tuple[str, str]]:
    allocation, assumed = estimate.allocation, estimate.assumptions
    yield "model", f"{run.family}, {run.parameters:,} parameters"
    jobs = f" in {counted(run.jobs, 'job')}" if run.jobs > 1 else ""
    yield "training", f"{counted(run.steps, 'step')}{jobs}, {run.tokens:,} tokens"
    if run.epochs:
        yield "epochs", _epochs(run)
    number = counted(run.checkpoints, "checkpoint")
    yield "checkpoints", f"{number} of {in_bytes(round(run.checkpoint_bytes))}"
    if run.memory:
        kinds = ("weights", "gradients", "optimizer", "activations")
        parts = ", ".join(f"{k} {in_bytes(round(getattr(run.memory, k)))}" for k in kinds)
        yield "memory", f"{in_bytes(round(run.memory.total))} a rank at most ({parts})"
    yield "compute", f"{run.flops:.2e} FLOPs"
    where = f"{counted(allocation.nodes, 'node')}, {counted(allocation.ranks, 'rank')}"
    if run.hours is None or run.node_hours is None:
        yield "time", f"{where}: give --device for the time"
        return
    seconds = 3600 * run.hours
    yield (
        "time",
        f"{duration(round(seconds) if seconds >= 60 else seconds)} on {where} of "
        f"{allocation.device}, if training reaches {assumed.mfu:.0%} of its peak in "
        f"{run.precision} (--mfu): {_node_hours(run.node_hours)}",
    )
    if run.price is not None:
        yield "price", f"{run.price:,.2f} at {assumed.price_per_node_hour:g} a node-hour"


def _node_hours(number: float) -> str:
    return f"{number:,.1f} node-hours" if number >= 0.1 else "less than 0.1 node-hours"


def _epochs(run: RunEstimate) -> str:
    parts = [f"{name} {passes:.2f}" for name, passes in run.epochs.items()]
    more = f" and {len(parts) - 8:,} more" if len(parts) > 8 else ""
    return ", ".join(parts[:8]) + more + " epochs" * (not more)
