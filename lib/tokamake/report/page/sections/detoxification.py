"""Toxicity and perplexity before and after training on the least toxic texts."""

from collections.abc import Sequence
from html import escape
from typing import Any

from tokamake.report import html_pages
from tokamake.report.page.contents import PageContents

TITLE = "Detoxification"
PLACE = 56

_GROUPS = {"all": "all prompts", "toxic": "toxic prompts", "nontoxic": "nontoxic prompts"}
_MEASURES = {
    "expected_maximum_toxicity": "expected maximum toxicity",
    "toxicity_probability": "toxicity probability",
}


def render(contents: PageContents) -> str:
    """For each run with detoxify.json: tables of its scores and of the generated texts."""
    measured = {run: contents.read(run, "detoxify.json") for run in contents.folders}
    return "\n".join(
        f"<h3>{escape(run)}</h3>\n{tables(results)}" for run, results in measured.items() if results
    )


def tables(results: dict[str, Any]) -> str:
    """Tables of the results of `measure-toxicity`."""
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
    return html_pages.sections(parts, level=4)


def _row(name: str, values: Sequence[float | None], *, form: str) -> list[str]:
    before, after = values
    change = None if before is None or after is None else after - before
    return [
        name,
        *(html_pages.cell(value, form) for value in values),
        html_pages.cell(change, f"+{form}"),
    ]


def _texts(texts: dict[str, Any]) -> str:
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
