"""Texts of the files of a project."""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from tokamake.config.architecture_files import read_architecture
from tokamake.estimate.parameters import num_parameters
from tokamake.project.corpora import FoundCorpus, absolute
from tokamake.project.sizes import ProjectSize, StartModel
from tokamake.runtime.console import counted
from tokamake.units import in_bytes

_MOST_KEYS = 12


class Project(NamedTuple):
    """Facts that the files of a project state."""

    folder: Path
    """Absolute path."""
    run: str
    repository: Path
    """Clone of tokamake, with its workflow."""
    profile: str
    """Name or folder of the profile, as commands name it in the project."""
    corpora: Sequence[FoundCorpus]
    size: ProjectSize
    prompts: Sequence[str]

    @property
    def profile_option(self) -> str:
        """Option of `tokamake run`; empty for the default profile."""
        return "" if self.profile == "local" else f" --profile {shlex.quote(self.profile)}"

    @property
    def tokens(self) -> int:
        """Tokens that the training reads."""
        size = self.size
        return size.train_steps * size.global_batch_size * size.sequence_length


SNAKEFILE = """\
# The workflow of this folder: all rules of tokamake. `tokamake run` and `snakemake` read this file.
# Rules of your own can follow below. If the clone of tokamake moves, change its path here.
if not workflow.overwrite_configfiles:  # a file given by --configfile replaces this one

    configfile: "config/config.yaml"


module tokamake:
    snakefile:
        {snakefile}
    config:
        config


use rule * from tokamake
"""
CONFIG = """\
# yaml-language-server: $schema={repository}/config/schema.json
# What to build. A key that is missing has its default. All keys:
# {repository}/docs/reference/config.md
# The profile says where it runs. Paths are relative to the project folder.

run: {name} # name of the run; its files are in results/{run}/
seed: 1234

corpora: config/corpora.tsv # the raw text

tokenizer: # a BPE tokenizer is trained on the text; path: FOLDER takes an existing one
  vocab_size: {size.vocab_size}

tokenize:
  on_bad_document: stop # or quarantine: set bad documents aside, up to max_bad_fraction of them
  deduplicate: false # or true: drop documents whose text occurred before

model: # other shapes are in {repository}/config/models
  architecture: {model} # {parameters} parameters
  # checkpoint: /models/llama2-7b # starts from a model instead; then also train.finetune: true

train:
  train_steps: {size.train_steps} # {tokens} tokens, {size.passes:.1f} passes over the text{advice}
  sequence_length: {size.sequence_length}
  micro_batch_size: {size.micro_batch_size} # samples of a rank at a time; more need more memory
  global_batch_size: {size.global_batch_size} # samples of a step
  split: {size.split} # shares of the documents: training, validation, test{no_validation}
  optimizer: {{name: adamw, learning_rate: {size.model.learning_rate}, weight_decay: 0.1}}
  schedule: {{name: cosine, warmup_fraction: 0.1, min_ratio: 0.1}}
  precision: {precision} # or bf16, on devices that have it
  log_interval: {log_interval} # steps between lines of the log
  evaluation_interval: {size.interval} # steps between validations
  evaluation_steps: {evaluation_steps}
  save_interval: {save_interval} # steps between checkpoints

evaluate:
  max_tokens: 100000 # of each corpus

generate: # text that the trained model writes, for the report
  prompts: {prompts}
"""
CORPORA = """\
# A row for each corpus, with one tab between columns.
# files: files, folders and glob patterns, separated by spaces, relative to the project folder.
#   Quote a name that contains a space. New files in a folder or pattern count at the next start.
# text_key: key or column that holds the text.
# {share}
# All columns: {repository}/config/README.md
"""
_WEIGHT = "weight: share of the training samples, relative to the other corpora."
_TEMPERATURE = (
    "temperature: 1 is a share in proportion to tokens. A column weight in its place sets shares."
)
README = """\
# {run}

A language model of the text in [config/corpora.tsv](config/corpora.tsv), built by tokamake, which
is in {repository}.

```sh
{activate}cd {folder}
tokamake run config/config.yaml{profile} -n    # lists the jobs and their cost, and runs none
tokamake run config/config.yaml{profile}       # builds all; Ctrl-C stops, the same continues
tokamake status      # from another shell: progress, loss, time left
```

The command line takes settings, too: `tokamake run config/config.yaml train.train_steps=1000`.
Before a long training on several ranks, `tokamake prove config/config.yaml` compares the gradients
of its layout with one process, in minutes and without data.

Results are in this folder:

| result | content |
|---|---|
| `results/report.html` | losses, samples, cost: open it in a browser |
| `results/{run}/training/` | checkpoints and metrics |
| `results/{run}/export/` | the model for `transformers`, with its tokenizer |

```sh
tokamake generate --checkpoint results/{run}/training --prompt {prompt}
tokamake serve results/{run}/training    # a page to try it
```

| file | content |
|---|---|
| `config/config.yaml` | what to build: tokenizer, model, training |
| `config/corpora.tsv` | the raw text |
{profile_row}| `Snakefile` | the workflow, for `tokamake run` and for `{snakemake}` |
"""


def snakefile(project: Project) -> str:
    """The Snakefile, which uses the workflow of the clone as a module."""
    path = json.dumps(str(project.repository / "workflow" / "Snakefile"), ensure_ascii=False)
    return SNAKEFILE.format(snakefile=path)


def model_file(model: StartModel) -> Path:
    """Path of a model's file in a project, and in the clone."""
    return Path("config", "models", f"{model.file}.yaml")


def config(project: Project) -> str:
    """The config, with a comment on each choice."""
    size = project.size
    has_validation = size.split != "100,0,0"
    file = project.repository / model_file(size.model)
    architecture = read_architecture(Path(f"{file}:vocab_size={size.vocab_size}"))
    return CONFIG.format(
        repository=project.repository,
        name=yaml.safe_dump(project.run).splitlines()[0],  # quotes 2024 and null
        run=project.run,
        size=size,
        model=model_file(size.model),
        parameters=f"{num_parameters(architecture) / 1e6:,.1f} million",
        tokens=f"{project.tokens:,}",
        advice="; more steps make it better" if size.is_first else "",
        no_validation="" if has_validation else "; too few documents to hold some out",
        evaluation_steps=4 if has_validation else 0,
        precision="fp32" if size.is_first or size.model.parameters < 1e8 else "bf16",
        log_interval=max(1, size.train_steps // 40),
        save_interval=5 * size.interval,
        prompts=json.dumps([*project.prompts], ensure_ascii=False),
    )


def corpora(project: Project) -> str:
    """The table of corpora; comments say which files and keys were found."""
    is_alone = len(project.corpora) == 1
    share = "weight" if is_alone else "temperature"
    text = CORPORA.format(
        share=_WEIGHT if is_alone else _TEMPERATURE, repository=project.repository
    )
    for corpus in project.corpora:
        text += f"# {corpus.name}: {found(corpus)}\n"
    text += f"corpus\tfiles\ttext_key\t{share}\n"
    for corpus in project.corpora:
        names = shlex.join(_from(project.folder, pattern) for pattern in corpus.patterns)
        text += f"{corpus.name}\t{names}\t{corpus.text_key}\t1\n"
    return text


def found(corpus: FoundCorpus) -> str:
    """Files, size, formats and keys of a corpus."""
    formats = ", ".join(dict.fromkeys(each.format for each in corpus.first))
    num_more = len(corpus.keys) - _MOST_KEYS
    keys = ", ".join(key for key in corpus.keys[:_MOST_KEYS] if key.isprintable())
    more = f" and {num_more:,} more" if num_more > 0 else ""
    return (
        f"{counted(len(corpus.files), 'file')}, {in_bytes(corpus.bytes)}, {formats}; "
        f"keys: {keys}{more}"
    )


def _from(folder: Path, name: str) -> str:
    """A path as the project names it: relative to it for files beside it."""
    path = absolute(name)
    return os.path.relpath(path, folder) if path.is_relative_to(folder.parent) else str(path)


def readme(project: Project, *, environment: Path | None) -> str:
    """The README: commands, results, files.

    Args:
        environment: virtual environment to activate.
    """
    has_copy = not Path(project.profile).is_absolute()
    path = f"profiles{os.sep}{project.profile}" if has_copy else project.profile
    activate = shlex.quote(str(environment / "bin" / "activate")) if environment else ""
    return README.format(
        run=project.run,
        repository=project.repository,
        activate=f"source {activate}\n" if environment else "",
        folder=shlex.quote(str(project.folder)),
        profile=project.profile_option,
        prompt=shlex.quote(project.prompts[0]),
        profile_row=f"| `{path}/profile.yaml` | where it runs: nodes, ranks, times |\n" * has_copy,
        snakemake=f"snakemake --profile {shlex.quote(path)}",
    )


def profile(text: str, source: Path) -> str:
    """A copied profile, with a comment about its scripts."""
    return (
        f"# Copy of {source}, to change here.\n"
        f"# Scripts that it names, such as launch.sh, are read from {source.parents[2]};\n"
        f"# a script of the same path in this folder replaces them.\n{text}"
    )
