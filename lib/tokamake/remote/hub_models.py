"""Models of the Hugging Face Hub: which files tokamake reads, pinned at a commit.

A list of the files of a commit lies beside its folder, COMMIT.json. A workflow brings config and
tokenizer before its checks, which read them, and has a job for each file of the weights.
"""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from tokamake.errors import UserError
from tokamake.files import read_json, write_json
from tokamake.remote.download import download, list_files
from tokamake.remote.hub import link_revision, pinned_path
from tokamake.remote.hub_address import parse_address
from tokamake.remote.remote_file import FOLDER, RemoteFile

_SAFETENSORS, _PICKLED = "model*.safetensors", "pytorch_model*.bin"
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model", "additional_chat_templates/*.jinja"),
)
_MODEL = ("config.json", "generation_config.json", *_TOKENIZER)
_SMALL_BYTES = 100_000_000
"""Size up to which a file that is no weights by its name comes before the checks."""
_MODELS = Path(FOLDER, "hub/models")
"""Folder of links to models: ORG/NAME/COMMIT."""


def list_model(address: str, *, tokenizer_only: bool) -> list[RemoteFile]:
    """List the files of a model that tokamake reads: config, tokenizer, weights in one form.

    Args:
        address: hf://ORG/NAME@REVISION, or a folder, file or pattern in it. A file and those of a
            pattern are listed as they are.
        tokenizer_only: list only the files of its tokenizer.

    Raises:
        UserError: there is no such model, it has no such files, or there is no network.
    """
    files, path = list_files(address), parse_address(address).path
    names = {parse_address(file.url).path: file for file in files}
    folder = f"{path}/" if path else ""
    if not all(name.startswith(folder) for name in names):
        return files
    own = {name.removeprefix(folder): file for name, file in names.items()}

    def matching(*patterns: str) -> list[RemoteFile]:
        return [f for name, f in own.items() if any(fnmatch(name, each) for each in patterns)]

    weights: list[RemoteFile] = []
    if not tokenizer_only:
        weights = matching(_SAFETENSORS, "model*.safetensors.index.json")
        weights = weights or matching(_PICKLED, "pytorch_model.bin.index.json")
        if not weights:
            raise UserError(
                f"{address}: has no {_SAFETENSORS} or {_PICKLED}; name files by a pattern, "
                "or only the tokenizer with --tokenizer"
            )
    if not (others := matching(*(_TOKENIZER if tokenizer_only else _MODEL))):
        missing = "file of a tokenizer" if tokenizer_only else "config.json and no tokenizer"
        raise UserError(f"{address}: has no {missing}; name files by a pattern")
    return [*others, *weights]


def pin(address: str, *, tokenizer_only: bool) -> Path:
    """Bring the config and the tokenizer of a model, for the checks of a workflow.

    A revision stays at the commit that it had when it was first pinned or last fetched. The network
    is asked only for what is missing.

    Args:
        address: hf://ORG/NAME@REVISION, or a folder or file in it.
        tokenizer_only: bring the tokenizer alone.

    Returns:
        Path of what the address names, with the commit in it.

    Raises:
        UserError: there is no such model, it cannot be downloaded, or there is no network.
    """
    path = pinned_path(address)
    files = _listed_below(path) if path else []
    if not tokenizer_only and all(_is_of_tokenizer(file) for file in files):
        files = []  # its tokenizer alone was fetched
    if not files:
        files = list_model(address, tokenizer_only=tokenizer_only)
        remember(files)
    for file in files:
        if (link := Path(file.path)).exists():
            continue
        if is_weights(file):
            link.unlink(missing_ok=True)  # gone from the cache; Snakemake takes a link for a file
        else:
            download(file)
    link_revision(address, files[0])
    pinned = pinned_path(address)
    assert pinned, "link_revision has linked it"
    return pinned


def fetched_path(address: str) -> Path:
    """Return where what an address names was put, with the commit in the path.

    Weights may be missing: a job of the workflow brings them.

    Raises:
        UserError: it was not fetched, or the cache was emptied.
    """
    parsed = parse_address(address)
    path = pinned_path(address) or parsed.fetched
    to_come = {Path(file.path) for file in unfetched(path)}
    is_whole = path.is_dir() and all(file.exists() or file in to_come for file in path.rglob("*"))
    if not (path.is_file() or is_whole):
        state = "gone from the cache" if path.is_symlink() or path.is_dir() else "not fetched yet"
        raise UserError(
            f"{address}: {state}: {path}; run `tokamake fetch {address}` here, on a node with a "
            "network (with --tokenizer, only the tokenizer comes)"
        )
    return path


def is_weights(file: RemoteFile) -> bool:
    """Whether a file is too large to come before a dry run: weights."""
    name = Path(file.path).name
    return fnmatch(name, _SAFETENSORS) or fnmatch(name, _PICKLED) or file.size > _SMALL_BYTES


def unfetched(path: Path) -> list[RemoteFile]:
    """Weights below the folder of a model that are listed and not downloaded, or gone."""
    files = filter(is_weights, _listed_below(path))
    return [file for file in files if not Path(file.path).exists()]


def remember(files: Iterable[RemoteFile]) -> None:
    """Add files of a model, all of one commit, to the list of the commit."""
    files = list(files)
    commit = Path(files[0].path).relative_to(_MODELS).parts[:3]
    listed = _MODELS.joinpath(*commit)
    known = {file.path: file for file in (*_listed_below(listed), *files)}
    entries = [known[path]._asdict() for path in sorted(known)]
    write_json(listed.with_suffix(".json"), {"files": entries})


def _is_of_tokenizer(file: RemoteFile) -> bool:
    return any(fnmatch(Path(file.path).name, pattern) for pattern in _TOKENIZER)


def _listed_below(path: Path) -> list[RemoteFile]:
    """Listed files of a folder or a file of a commit; none for any other path."""
    if not path.is_relative_to(_MODELS):
        return []
    file = _MODELS.joinpath(*path.relative_to(_MODELS).parts[:3]).with_suffix(".json")
    if not file.is_file():
        return []
    read = read_json(file, "remove it, and run `tokamake fetch` again")
    files = [RemoteFile(**entry) for entry in read["files"]]
    return [file for file in files if Path(file.path).is_relative_to(path)]
