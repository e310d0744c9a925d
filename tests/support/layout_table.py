"""The tables of docs/reference/parallelism.md, from the layouts in the tests; run to rewrite.

Pairs of kinds of parallelism are proved in one layout, refused with a reason, or neither. The tests
have the proved layouts, the checks of a run the reasons.
"""

import re
from itertools import product
from typing import Any, NamedTuple

from pydantic import ValidationError

from tests.support.layouts import parallel
from tests.support.paths import ROOT
from tests.support.proofs import SHAPE, Changes, Proved
from tests.support.runs import ARCHITECTURE
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight.model import check_layout
from tokamake.preflight.run import check_ranks

DOCUMENT = ROOT / "docs/reference/parallelism.md"
COMMAND = "python -m tests.support.layout_table"

STARTS = {
    "untied": "4 / 2, untied",
    "tied": "4 / 2, tied",
    "mqa": "4 / 1, untied",
    "deep": "4 / 2, untied, 8 layers",
    "gpt": "4 / 2, untied, GPT",
}
"""Query and key-value heads, whether embedding and output layer share weights, the family."""

HEADER = (
    *("Ranks", "dp × pp × cp × tp", "ZeRO", "Schedule, stages a rank", "Sequence parallel"),
    *("Recompute", "Heads, output layer", "Besides"),
)
IN_COLUMNS = {
    *("tensor_parallel_size", "sequence_parallel", "context_parallel_size"),
    *("pipeline_parallel_size", "pipeline_schedule", "virtual_pipeline_size"),
    *("backend", "zero_stage", "recompute_granularity", "parallel"),
}


class Kind(NamedTuple):
    """A kind of parallelism, or another way to save memory."""

    short: str
    """Name in the head of the table."""
    choice: str
    """Setting of which it is a value; two values of one setting exclude each other."""
    changes: Changes
    """Settings that turn it on, given enough ranks."""


KINDS = {
    "data-parallel ranks": Kind("dp", "data", {}),
    **{f"ZeRO {n}": Kind(f"Z{n}", "zero", {"zero_stage": n}) for n in range(4)},
    "HSDP": Kind("HSDP", "replicas", parallel(replicas=2)),
    "tensor": Kind("tp", "tensor", parallel(tp=2)),
    "sequence": Kind("sp", "sequence", parallel(tp=2, sp=True)),
    "context, ring": Kind("ring", "context", parallel(cp=2)),
    "context, ulysses": Kind("uly", "context", parallel(cp=2, method="ulysses")),
    "pipeline, gpipe": Kind("gp", "pipeline", parallel(pp=2, schedule="gpipe")),
    "pipeline, 1f1b": Kind("1f", "pipeline", parallel(pp=2)),
    **{
        f"pipeline, {name}": Kind(short, "pipeline", parallel(pp=2, schedule=name, vpp=2))
        for name, short in (
            ("interleaved_1f1b", "i1f"),
            ("interleaved_zero_bubble", "izb"),
            ("zbv", "zbv"),
        )
    },
    "recompute, selective": Kind("sel", "recompute", {"recompute_granularity": "selective"}),
    "recompute, full": Kind("full", "recompute", {"recompute_granularity": "full"}),
    "accumulation": Kind("acc", "accumulation", {}),
}


def settings(changes: Changes) -> TrainSettings:
    """The section `train` of a proof."""
    usual = {"train_steps": 24, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32"}
    return TrainSettings.model_validate({**usual, **changes})


def kinds_of(world_size: int, changes: Changes) -> set[str]:
    """Kinds of parallelism that have an effect in a layout."""
    train = settings(changes)
    parallel = train.parallel
    data, context = parallel.data_parallel_size(world_size), parallel.context_parallel_size
    block = train.micro_batch_size * data
    kinds = {
        "data-parallel ranks": data > 1,
        f"ZeRO {train.zero_stage}": data * context > 1,
        "HSDP": parallel.data_parallel_replicate_size > 1,
        "tensor": parallel.tensor_parallel_size > 1,
        "sequence": parallel.sequence_parallel,
        f"context, {parallel.context_parallel_method}": context > 1,
        f"pipeline, {parallel.pipeline_schedule}": parallel.pipeline_parallel_size > 1,
        f"recompute, {train.recompute_granularity}": train.recompute_granularity != "none",
        "accumulation": any(size > block for size in train.batch_sizes.all),
    }
    return {name for name, is_used in kinds.items() if is_used}


def proved_pairs(proved: Proved) -> set[tuple[str, str]]:
    """Pairs of kinds that a layout has together; includes each kind with itself."""
    return {
        pair
        for world_size, layouts in proved.items()
        for _, changes in layouts
        for pair in product(kinds_of(world_size, changes), repeat=2)
    }


def refusal(backend: str, first: str, second: str) -> str:
    """Error message for a run with both kinds and defaults for the rest; empty: it starts."""
    changes = _both(KINDS[first].changes, KINDS[second].changes)
    sizes = ("tensor", "context", "pipeline")
    try:
        # Four data-parallel ranks, of two micro batches each.
        train = settings({"backend": backend, "micro_batch_size": 1, **changes})
        world_size = 4
        for size in sizes:
            world_size *= getattr(train.parallel, f"{size}_parallel_size")
        architecture = ARCHITECTURE.model_copy(update=SHAPE)
        check_ranks(train, world_size)
        check_layout(train, architecture)
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    except UserError as error:
        return str(error)
    return ""


def _both(first: Changes, second: Changes) -> Changes:
    parallel: dict[str, Any] = {**first.get("parallel", {}), **second.get("parallel", {})}
    return {**first, **second, "parallel": parallel}


def pairs(backend: str, proved: Proved) -> str:
    """A Markdown table of all pairs of kinds, and the reasons of those that are refused."""
    together, reasons = proved_pairs(proved), dict[str, int]()

    def cell(row: str, column: str) -> str:
        if row != column and KINDS[row].choice == KINDS[column].choice:
            return ""
        reason = refusal(backend, row, column)
        assert not (reason and (row, column) in together), f"proved, but refused: {reason}"
        if reason:
            return f"no {reasons.setdefault(reason, len(reasons) + 1)}"
        return "yes" if (row, column) in together else "–"

    lines = [("", *(kind.short for kind in KINDS.values())), ("---",) * (len(KINDS) + 1)]
    for row, kind in KINDS.items():
        lines.append((f"{row} ({kind.short})", *(cell(row, column) for column in KINDS)))
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return rows + "\n" + "".join(f"{number}. {reason}\n" for reason, number in reasons.items())


def row(world_size: int, start: str, changes: dict[str, Any]) -> tuple[str, ...]:
    """Cells of a layout in the table."""
    train = settings(changes)
    parallel = train.parallel
    tensor, context = parallel.tensor_parallel_size, parallel.context_parallel_size
    pipeline, data = parallel.pipeline_parallel_size, parallel.data_parallel_size(world_size)
    # DeepSpeed's stages also shard parameters that no other rank has.
    sharing = data * context > 1 or train.backend == "deepspeed"
    staged = f"{parallel.pipeline_schedule}, {parallel.virtual_pipeline_size}"
    besides = {**changes, **changes.get("parallel", {})}
    if parallel.context_parallel_size > 1:
        besides["context_parallel_method"] = parallel.context_parallel_method
    return (
        str(world_size),
        f"{data} × {pipeline} × {context} × {tensor}",
        str(train.zero_stage) if sharing else "–",
        staged if pipeline > 1 else "–",
        "yes" if parallel.sequence_parallel else "–",
        train.recompute_granularity,
        STARTS[start],
        ", ".join(f"{k} {_plain(v)}" for k, v in besides.items() if k not in IN_COLUMNS) or "–",
    )


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def table(proved: Proved) -> str:
    """A Markdown table of layouts."""
    rows = [row(ranks, *layout) for ranks, layouts in proved.items() for layout in layouts]
    lines = [HEADER, ("---",) * len(HEADER), *dict.fromkeys(rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def document(all_proved: dict[str, Proved]) -> str:
    """The document with new tables, each between the two comments with its name."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for backend, proved in all_proved.items():
        text = _put(text, f"{backend} pairs", pairs(backend, proved))
        text = _put(text, backend, table(proved))
    return text


def _put(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- begin {name}: {COMMAND} -->\n", f"<!-- end {name} -->"
    between = re.compile(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)
    text, count = between.subn(lambda _: f"\n{content}\n", text)
    assert count == 1, f"{DOCUMENT}: {begin} and {end} are not there once"
    return text


def all_proved() -> dict[str, Proved]:
    """Proved layouts of each back end."""
    from tests.train.backends import test_deepspeed, test_native_layouts

    return {"native": test_native_layouts.PROVED, "deepspeed": test_deepspeed.PROVED}


if __name__ == "__main__":
    DOCUMENT.write_text(document(all_proved()), encoding="utf-8")
