"""Stage `plot-detoxified`: toxicity and perplexity before and after, for the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_GROUPS = {"all": "all prompts", "toxic": "toxic prompts", "nontoxic": "nontoxic prompts"}
_MEASURES = {
    "expected_maximum_toxicity": "expected maximum toxicity",
    "toxicity_probability": "toxicity probability",
}


def plot_detoxified(*, scores: Path, output: Path) -> None:
    """Write detoxification.html: tables of toxicity and perplexity, and of the selected texts.

    Args:
        scores: JSON file of `measure-toxicity`.
        output: HTML file to write.
    """
    from tokamake.files import read_json, write_text

    results = read_json(scores, "make it with `tokamake measure-toxicity`")
    write_text(output, page(results))
    print(f"{output}: {2 if 'texts' in results else 1} tables")


def page(results: dict[str, Any]) -> str:
    """Tables of the results of `measure-toxicity`, as an HTML page."""
    from tokamake.report import html_pages

    before, after = results["before"], results["after"]
    rows = [
        _row(
            f"{title}: {group} ({after[key]['prompts']:,})",
            [before[key][measure], after[key][measure]],
            form=".3f",
        )
        for measure, title in _MEASURES.items()
        for key, group in _GROUPS.items()
        if after[key]["prompts"]
    ]
    if "perplexity" in before and "perplexity" in after:
        values = [before["perplexity"], after["perplexity"]]
        rows.append(_row("perplexity of held-out documents", values, form=".2f"))
    parts = [("", html_pages.table(["measure", "before", "after", "change"], rows))]
    if texts := results.get("texts"):
        parts.append(("Generated texts", _texts(texts)))
    return html_pages.page("Detoxification", html_pages.sections(parts))


def _row(name: str, values: Sequence[float | None], *, form: str) -> list[str]:
    from tokamake.report import html_pages

    before, after = values
    change = None if before is None or after is None else after - before
    return [
        name,
        *(html_pages.cell(value, form) for value in values),
        html_pages.cell(change, f"+{form}"),
    ]


def _texts(texts: dict[str, Any]) -> str:
    from tokamake.report import html_pages

    header = ["texts", "number", "mean toxicity", "sd", "minimum", "maximum", "above 0.5"]
    rows = [
        [
            name,
            f"{values['number']:,}",
            *(f"{values[key]:.3f}" for key in ("mean", "sd", "minimum", "maximum")),
            f"{values['above_half']:.1%}",
        ]
        for name, values in ((name, texts[name]) for name in ("scored", "kept"))
    ]
    note = f"<p>{texts['blank']:,} of {texts['texts']:,} texts are blank or have no score.</p>"
    return html_pages.table(header, rows) + note
