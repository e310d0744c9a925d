"""Tool `new`: a project folder beside the data."""

import os
import shlex
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokamake.project.corpora import FoundCorpus
    from tokamake.project.texts import Project

_PROMPT_CHARACTERS = 40
_PROMPT_TEXTS = 12
"""Documents of a corpus among which three prompts are found."""


def new(project: Path, *files: str, profile: str = "", text_key: str = "") -> None:
    """Make a project folder for raw files: config, table of corpora, profile, README, Snakefile.

    `tokamake run` and `snakemake` work in the folder, with the workflow of the clone of tokamake,
    and results are in the folder. Model, tokenizer and length of the training follow from the size
    of the text; the config says why.

    Args:
        project: Folder to make. Its name becomes the name of the run.
        files: Raw files: files, folders and glob patterns. A folder or pattern is a corpus; the
            files of one folder are one, too.
        profile: Name or folder of a profile. A profile of the clone is copied. By default
            $SNAKEMAKE_PROFILE, else local.
        text_key: Key or column that holds the text. By default it follows from the first documents.
    """
    from tokamake.doctor.find_profile import find_profile, find_repository
    from tokamake.doctor.profile import read_profile
    from tokamake.project.corpora import absolute, find_corpora
    from tokamake.project.sizes import size_of
    from tokamake.project.texts import Project

    folder = absolute(project)
    _check_folder(folder, project)
    if not files:
        raise UserError("FILES is missing; name your raw files, their folder or a pattern")
    repository = find_repository()
    site = find_profile(profile or os.environ.get("SNAKEMAKE_PROFILE", "local"))
    _refuse_inside(folder, files)
    corpora = find_corpora(files, text_key=text_key)
    resources = read_profile(site, repository)
    ranks = str(resources.resource("tasks", "train") or 1)
    is_copied = site.resolve().parent == repository / "profiles"
    made = Project(
        folder=folder,
        run=_run_name(folder),
        repository=repository,
        profile=site.name if is_copied else str(site.resolve()),
        corpora=corpora,
        size=size_of(
            corpora,
            num_ranks=int(ranks) if ranks.isdecimal() else 1,
            is_local=not resources.cluster,
        ),
        prompts=_prompts(corpora),
    )
    _write(made, site if is_copied else None)
    _print(made)


def _check_folder(folder: Path, name: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{name}: a file is there; name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{name}: a folder that is not empty; name a new folder")
    if not str(folder).isprintable():
        raise UserError(
            f"{str(folder)!r}: has a character that does not print; name another folder"
        )
    if {*"{}"} & {*str(folder)}:
        raise UserError(
            f"{folder}: has a brace, which Snakemake reads as a wildcard; name another folder"
        )


def _refuse_inside(folder: Path, names: "Sequence[str]") -> None:
    """Refuse a project below a folder of raw files: its results would become raw files."""
    from tokamake.project.corpora import absolute

    for name in names:
        if name and Path(name).is_dir() and folder.is_relative_to(absolute(name)):
            raise UserError(
                f"{folder}: lies in {name}, so that its files would count as raw text; make it "
                "elsewhere, or name files or a pattern"
            )


def _run_name(folder: Path) -> str:
    from tokamake.config.root import RESERVED_RUNS
    from tokamake.project.corpora import word

    name = word(folder.name, "model")
    return f"{name}-model" if name in RESERVED_RUNS else name


def _prompts(corpora: "Sequence[FoundCorpus]") -> list[str]:
    """First words of some documents, in the language of the text; letters rather than signs."""
    found: list[str] = []
    for corpus in corpora:
        texts = islice(corpus.first_texts, _PROMPT_TEXTS)
        words = [" ".join(text[:200].split()[:3])[:_PROMPT_CHARACTERS] for text in texts]
        usable = dict.fromkeys(filter(str.isprintable, filter(None, words)))
        found += sorted(usable, key=lambda text: sum(map(str.isalpha, text)) < len(text) / 2)[:3]
    return [*dict.fromkeys(found)][:4] or ["The"]


def _write(project: "Project", site: Path | None) -> None:
    """Write all files of a project, or none.

    Args:
        site: folder of a profile to copy.
    """
    from tokamake import files as disk
    from tokamake.project import texts

    model = texts.model_file(project.size.model)
    contents = {
        "Snakefile": texts.snakefile(project),
        "README.md": texts.readme(project, environment=_environment()),
        "config/config.yaml": texts.config(project),
        "config/corpora.tsv": texts.corpora(project),
        str(model): (project.repository / model).read_text(encoding="utf-8"),
    }
    if site:
        path = site.resolve() / "profile.yaml"
        text = path.read_text(encoding="utf-8")
        contents[f"profiles{os.sep}{site.name}{os.sep}profile.yaml"] = texts.profile(text, path)
    project.folder.parent.mkdir(parents=True, exist_ok=True)
    with disk.atomic_folder(project.folder) as temporary:
        for name, text in contents.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_text(text, encoding="utf-8")


def _environment() -> Path | None:
    """The virtual environment of this program."""
    folder = Path(sys.prefix)
    return folder if (folder / "bin" / "activate").is_file() else None


def _print(project: "Project") -> None:
    """Say what was found and made, and the next command."""
    from tokamake.project.texts import found

    for corpus in project.corpora:
        print(f"{corpus.name}: {found(corpus)}; text: {corpus.text_key}")
    size = project.size
    print(
        f"{project.folder}: model {size.model.file}, a tokenizer of {size.vocab_size:,} tokens, "
        f"{size.train_steps:,} steps, profile {project.profile}"
    )
    for bad in [each.bad for corpus in project.corpora for each in corpus.first if each.bad]:
        print(
            f"warning: {bad}; or set tokenize.on_bad_document: quarantine in config/config.yaml",
            file=sys.stderr,
        )
    if size.split == "100,0,0":
        print("few documents: none is held out for validation; see train.split in the config")
    name = shlex.quote(os.path.relpath(project.folder))
    command = f"tokamake run config/config.yaml{project.profile_option}"
    print(f"next: cd {name} && {command}; README.md has more")
