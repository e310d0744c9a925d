"""Stage `model-card`: write the README.md of an exported model, for the Hugging Face Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from tokamake.config.resolved_run import Run


def model_card(
    *,
    config: Path,
    train: Path,
    metadata: Path,
    index: Path,
    files: tuple[str, ...] = (),
    base_model: str | None = None,
    license: str | None = None,
    recall: tuple[Path, ...] = (),
    bm25: tuple[Path, ...] = (),
    output: Path,
) -> None:
    """Write a model card: training data, recipe, losses, and how to use the model.

    The same inputs give the same bytes.

    Args:
        config: run.yaml of `resolve`.
        train: train.json of `train`.
        metadata: JSON file of `describe`.
        index: folder of `index`.
        files: CORPUS=FILES, the raw files of a corpus as the table of corpora names them.
        base_model: ORG/NAME of the model that training started from, on the Hugging Face Hub.
        license: licence of the model, such as apache-2.0.
        recall: manifests of `evaluate-retrieval` for the searches of a retriever.
        bm25: manifests for the searches of `search-bm25`, with the same names.
        output: README.md to write.
    """
    import math

    from tokamake.checkpoint import model_tensors
    from tokamake.config.objective import objective_data
    from tokamake.config.resolved_run import read_run
    from tokamake.files import read_json, write_text
    from tokamake.results.corpora import read_mixture

    run = read_run(config)
    trained = read_json(train, "make it with `tokamake train`")
    corpora = read_mixture(metadata=metadata, index=index, run=run)
    sources = dict(text.partition("=")[::2] for text in files)
    stacks = objective_data(run.train.objective).stacks
    num_parameters = sum(map(math.prod, model_tensors.shapes(run.architecture).values()))
    sections = [
        _front_matter(sources, stacks, base_model=base_model, license=license),
        _introduction(run, num_parameters, base_model=base_model),
        _data(corpora, sources),
        _training(run, trained),
        *_retrieval(recall, bm25),
        _use(stacks),
        _reproduction(run, trained, base_model=base_model),
    ]
    write_text(output, "\n".join(sections))
    print(f"{output}: model card of run {run.run}")


_PIPELINES = {
    "decoder": "text-generation",
    "encoder": "fill-mask",
    "encoder_decoder": "text2text-generation",
    "biencoder": "sentence-similarity",
    "retro": "text-generation",
}
"""Task of the Hub by the stacks of a family."""


def _front_matter(
    sources: dict[str, str], stacks: str, *, base_model: str | None, license: str | None
) -> str:
    import re

    import yaml

    addresses = " ".join(sources.values())
    datasets = dict.fromkeys(re.findall(r"hf://datasets/([\w.-]+/[\w.-]+)", addresses))
    fields: dict[str, Any] = {
        "library_name": "tokamake" if stacks in ("biencoder", "retro") else "transformers",
        "pipeline_tag": _PIPELINES[stacks],
        "tags": ["tokamake"],
    }
    if license:
        fields["license"] = license
    if base_model:
        fields["base_model"] = base_model
    if datasets:
        fields["datasets"] = list(datasets)
    return f"---\n{yaml.safe_dump(fields, sort_keys=True)}---\n"


def _introduction(run: "Run", num_parameters: int, *, base_model: str | None) -> str:
    from tokamake.report.describe_run import shape_of

    start = f" Training started from {base_model}." if base_model else ""
    return (
        f"# {run.run}\n\nA model with {num_parameters:,} parameters ({shape_of(run)}), trained by "
        f"tokamake.{start}\n"
    )


def _data(corpora: "pd.DataFrame", sources: dict[str, str]) -> str:
    from tokamake.results.corpora import total

    rows: list[tuple[str, ...]] = [
        ("corpus", "files", "documents", "tokens", "share of training", "epochs")
    ]
    for row in [*corpora.itertuples(), *total(corpora).itertuples()]:
        is_trained = bool(row.trained_tokens)
        rows.append(
            (
                row.corpus,
                f"`{sources[row.corpus]}`" if row.corpus in sources else "",
                f"{row.documents:,}",
                f"{row.tokens:,}",
                f"{row.share_of_samples:.1%}" if is_trained else "held out",
                f"{row.epochs:.2f}" if is_trained else "",
            )
        )
    return f"## Data\n\n{_table(rows)}"


def _training(run: "Run", trained: dict[str, Any]) -> str:
    from tokamake.report.describe_run import losses_of, recipe_of

    rows: list[tuple[str, ...]] = [
        ("", ""),
        ("recipe", recipe_of(run)),
        ("trained", f"{trained['consumed_tokens']:,} tokens in {trained['step']:,} steps"),
        *losses_of(trained, run),
    ]
    return f"## Training\n\n{_table(rows)}"


def _retrieval(recall: tuple[Path, ...], bm25: tuple[Path, ...]) -> list[str]:
    """Table of the recall of a retriever beside BM25's; none without results."""
    from tokamake.files import read_sealed_json

    remedy = "make it with `tokamake evaluate-retrieval`"
    rows: list[tuple[str, ...]] = []
    for searcher, path in [*(("this model", p) for p in recall), *(("BM25", p) for p in bm25)]:
        result = read_sealed_json(path, remedy)
        rows = rows or [("questions", "search by", *(f"recall@{k}" for k in result["recall"]))]
        shares = (f"{share:.1%}" for share in result["recall"].values())
        rows.append((f"{path.stem} ({result['num_questions']:,})", searcher, *shares))
    return [f"## Retrieval\n\n{_table(rows)}"] if rows else []


def _use(stacks: str) -> str:
    """Code that uses the model.

    Args:
        stacks: stacks of layers of its family, the constant `STACKS`.
    """
    if stacks == "biencoder":
        return """## Use

```sh
tokamake embed-passages passages.tsv --checkpoint PATH --output vectors/passages.json
tokamake embed-questions questions.tsv --checkpoint PATH --output asked/questions.json
tokamake search --queries asked --embeddings vectors --top-k 20 --output found.json
```
"""
    if stacks == "retro":
        return """## Use

```sh
tokamake generate --checkpoint PATH --prompt "Text to continue" \\
  --chunks neighbors/chunks.json --data-root DATA --embedder EMBEDDER
```

Neighbors come from the index of its training; without `--chunks`, the model sees none.
"""
    model, inputs, output = {
        "decoder": (
            "AutoModelForCausalLM",
            "Text to continue",
            "tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0])",
        ),
        "encoder": (
            "AutoModelForMaskedLM",
            "Text with a [MASK] word",
            "tokenizer.decode(model(**inputs).logits[0].argmax(-1))",
        ),
        "encoder_decoder": (
            "AutoModelForSeq2SeqLM",
            "Text with <extra_id_0> left out",
            "tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0])",
        ),
    }[stacks]
    return f"""## Use

```python
from transformers import {model}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = {model}.from_pretrained("PATH")
inputs = tokenizer("{inputs}", return_tensors="pt")
print({output})
```
"""


def _reproduction(run: "Run", trained: dict[str, Any], *, base_model: str | None) -> str:
    import yaml

    def block(settings: dict[str, Any]) -> str:
        return f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```\n"

    versions = ", ".join(f"{name} {number}" for name, number in trained["versions"].items())
    shape = run.architecture.model_dump(mode="json", exclude_defaults=True)
    # Trackers may have addresses of the people who trained it.
    train = run.train.model_dump(mode="json", exclude_defaults=True, exclude={"trackers"})
    file = f"{run.run}-model.yaml"
    is_continued = base_model is not None or run.train.finetune is not None
    checkpoint = f"hf://{base_model}" if base_model else "CHECKPOINT"
    start = {"checkpoint": checkpoint} if is_continued else {"architecture": file}
    settings = {
        "run": run.run,
        "seed": run.seed,
        "corpora": f"{run.run}.tsv",
        "tokenizer": {"path": "PATH"},
        "model": start,
        "train": train,
    }
    start_text, model = "", ""
    if not is_continued:
        content = block({"family": run.architecture.family, **shape})
        model = f"\nThe model, `{file}`:\n\n{content}"
    elif not base_model:
        start_text = ", and the checkpoint that training started from in place of CHECKPOINT"
    return f"""## Reproduction

It was trained on {trained["world_size"]:,} ranks, with {versions}. To train it again in a clone
of tokamake: name the data above in a table of corpora, `{run.run}.tsv`, with the shares as weights,
and write the files below. Put the folder of this repository in place of PATH: it has the tokenizer.
Put the profile of your machine in place of PROFILE{start_text}.

```sh
make install
.venv/bin/snakemake --profile PROFILE --configfile {run.run}.yaml -- train
```

The config, `{run.run}.yaml`:

{block(settings)}{model}"""


def _table(rows: list[tuple[str, ...]]) -> str:
    """Markdown table; the first row is its header."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    lines.insert(1, f"|{' --- |' * len(rows[0])}")
    return "\n".join(lines) + "\n"
