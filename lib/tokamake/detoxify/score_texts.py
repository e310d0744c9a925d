"""Stage `score-texts`: the toxicity of each text of a file."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tokamake.errors import UserError

_BATCH = 256
"""Texts that a scorer gets at once."""


def score_texts(path: Path, *, scorer: str, output: Path) -> None:
    """Add the toxicity of each text to the lines of a jsonl file.

    Blank texts get no score: null.

    Args:
        path: jsonl file with a text in each line.
        scorer: the scorer, as in the config: a name, or JSON such as {"word_list": "words.txt"}.
        output: jsonl file to write: the lines of the input with toxicity, 0 to 1 or null.
    """
    import orjson

    from tokamake.config.scorers import load_scorer
    from tokamake.detoxify.text_lines import read_lines
    from tokamake.files import atomic

    name, score = load_scorer(scorer)
    num_scored = num_lines = 0
    with atomic(output) as (temporary,), temporary.open("wb") as file:
        stream = read_lines(path)
        while lines := list(islice(stream, _BATCH)):
            texts = [line.value["text"] for line in lines]
            scores = score_all(texts, score, name=f"{path}: scorer {name}")
            for line, value in zip(lines, scores, strict=True):
                file.write(orjson.dumps({**line.value, "toxicity": value}) + b"\n")
            num_lines += len(lines)
            num_scored += sum(value is not None for value in scores)
    print(f"{output}: {num_scored:,} of {num_lines:,} texts scored")


def score_all(
    texts: Sequence[str], score: Callable[[list[str]], Any], *, name: str
) -> list[float | None]:
    """Score texts, and check the result: a scorer may be anybody's code. Blank texts: None."""
    indices = [index for index, text in enumerate(texts) if text.strip()]
    scores: list[float | None] = [None] * len(texts)
    if not indices:
        return scores
    try:
        returned = list(score([texts[index] for index in indices]))
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{name}: failed ({message}); fix the scorer") from None
    if len(returned) != len(indices):
        raise UserError(
            f"{name}: {len(returned)} scores for {len(indices)} texts; return one for each"
        )
    for index, value in zip(indices, returned, strict=True):
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError):
            number = -1.0
        if number is not None and not 0 <= number <= 1:
            raise UserError(
                f"{name}: {value!r} for the text {texts[index][:40]!r}; return a number from 0 to "
                "1, or None"
            )
        scores[index] = number
    return scores
