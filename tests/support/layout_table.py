"""The tables of docs/reference/parallelism.md, from the layouts in the tests; run to rewrite."""

import re
from typing import Any

from tests.support.layout_pairs import pairs, settings
from tests.support.paths import ROOT
from tests.support.proofs import Proved

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
