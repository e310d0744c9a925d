"""Stage `select-texts`: the least toxic texts, in a random order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from tokamake.detoxify import TOXICITY_THRESHOLD
from tokamake.errors import UserError


class _Scored(NamedTuple):
    """A scored text: sorting puts the least toxic first, then the first of the files."""

    toxicity: float
    file: int
    offset: int


def select_texts(
    paths: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)],
    *,
    keep: float = 0.5,
    seed: int = 1234,
    output: Path,
    summary: Path,
) -> None:
    """Keep the least toxic share of the scored texts, and shuffle them.

    Of texts with the same score, the first ones are kept. Scores are in memory, texts are not.

    Args:
        paths: jsonl files of `score-texts`.
        keep: share of the scored texts to keep; their number is rounded down.
        seed: seed of the order of the kept texts.
        output: jsonl file to write: text and toxicity.
        summary: JSON file to write: number, mean, sd, minimum and maximum of the toxicity, and the
            share above 0.5, of all and of the kept texts.
    """
    import random

    from tokamake.detoxify.text_lines import read_lines, toxicity_of
    from tokamake.files import atomic, write_json

    if not 0 < keep <= 1:
        raise UserError(f"keep: {keep}: give a share above 0, at most 1")
    scored, num_texts = [], 0
    for file, path in enumerate(paths):
        for line in read_lines(path):
            num_texts += 1
            if (toxicity := toxicity_of(line)) is not None:
                scored.append(_Scored(toxicity, file, line.offset))
    kept = sorted(scored)[: int(len(scored) * keep)]
    if not kept:
        raise UserError(
            f"{', '.join(map(str, paths[:3]))}: {len(scored)} of {num_texts} texts have a score, "
            f"and keep {keep:g} of them leaves none; generate more texts, or raise keep"
        )
    random.Random(seed).shuffle(kept)
    with atomic(output) as (temporary,), temporary.open("wb") as file_to_write:
        _copy(kept, paths, output=file_to_write)
    counts = {"texts": num_texts, "blank": num_texts - len(scored)}
    write_json(summary, {**counts, "scored": _statistics(scored), "kept": _statistics(kept)})
    print(f"{output}: {len(kept):,} of {len(scored):,} scored texts")


def _copy(kept: Sequence[_Scored], paths: Sequence[Path], *, output: Any) -> None:
    """Write the text and the toxicity of lines at any place of the files."""
    from contextlib import ExitStack

    import orjson

    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        for _, file, offset in kept:
            files[file].seek(offset)
            line = orjson.loads(files[file].readline())
            fields = {name: line[name] for name in ("text", "toxicity")}
            output.write(orjson.dumps(fields) + b"\n")


def _statistics(scored: Sequence[_Scored]) -> dict[str, float]:
    import statistics

    values = [each.toxicity for each in scored]
    return {
        "number": len(values),
        "mean": statistics.fmean(values),
        "sd": statistics.pstdev(values),
        "minimum": min(values),
        "maximum": max(values),
        "above_half": sum(value > TOXICITY_THRESHOLD for value in values) / len(values),
    }
