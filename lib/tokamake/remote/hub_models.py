"""Models of the Hugging Face Hub: which files tokamake reads, pinned at a commit.

A JSON file beside the folder of a commit lists the files of an address. A workflow downloads
config and tokenizer before its checks, which read them; a job downloads each file of the weights.
"""

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tokamake.errors import UserError, of_system
from tokamake.files import digest, read_json, write_json
from tokamake.remote.addresses import COMMIT_DIGITS, FOLDER, HubAddress, RemoteFile, parse_address
from tokamake.remote.download import download, list_files
from tokamake.remote.hub import link_revision, pinned_path

_SAFETENSORS, _PICKLED = "model*.safetensors", "pytorch_model*.bin"
_TEMPLATES = "additional_chat_templates/"
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model", f"{_TEMPLATES}*.jinja"),
)
_MODEL = ("config.json", "generation_config.json", *_TOKENIZER)
_MODELS = Path(FOLDER, "hub/models")
"""Folder of links to models: ORG/NAME/COMMIT."""
_GONE = "start the workflow again on a node with a network"


def list_model(address: str, *, tokenizer_only: bool) -> list[RemoteFile]:
    """List the files of a model that tokamake reads: config, tokenizer, weights in one form.

    A single file, files of a pattern, and a folder with weights in another form are listed as
    they are.
    """
    files, path = list_files(address), parse_address(address).path
    names = {parse_address(file.url).path: file for file in files}
    folder = f"{path}/" if path else ""
    if not all(name.startswith(folder) for name in names):
        return files
    own = {name.removeprefix(folder): file for name, file in names.items()}
    own = {n: file for n, file in own.items() if "/" not in n or n.startswith(_TEMPLATES)}

    def matching(*patterns: str) -> list[RemoteFile]:
        return [f for name, f in own.items() if any(fnmatch(name, each) for each in patterns)]

    if tokenizer_only:
        if not (listed := matching(*_TOKENIZER)):
            raise UserError(f"{address}: has no file of a tokenizer; name another model or a file")
        return listed
    weights = matching(_SAFETENSORS, "model*.safetensors.index.json")
    weights = weights or matching(_PICKLED, "pytorch_model.bin.index.json")
    if weights and not (configs := matching(*_MODEL)):
        raise UserError(f"{address}: has no config.json and no tokenizer; name files by a pattern")
    if weights:
        return [*configs, *weights]
    if path:
        return files
    raise UserError(
        f"{address}: has no {_SAFETENSORS} or {_PICKLED}; name a folder of the repository, or its "
        "tokenizer alone"
    )


def fetch_model(address: str, *, tokenizer_only: bool) -> list[RemoteFile]:
    """List the files of a model at the commit that its revision has now, and pin it there.

    A part of a repository that is pinned is listed at the pinned commit. A file that a list of its
    commit has is taken from there, without the network.
    """
    parsed = parse_address(address)
    if parsed.is_commit and (file := _find_listed(parsed)):
        return [file]
    path = pinned_path(address)
    commit = _commit(path) if path and parsed.path else None
    files = list_model(_at(parsed, commit) or address, tokenizer_only=tokenizer_only)
    _write_list(parsed, files, tokenizer_only=tokenizer_only)
    return files


def pin(address: str, *, tokenizer_only: bool) -> Path:
    """Bring the config and the tokenizer of a model, for checks of a workflow; return their path.

    A branch stays at the commit that it had at first; `fetch_model` moves it. The network is asked
    only for missing files.
    """
    parsed = parse_address(address)
    if parsed.kind != "model":
        raise UserError(f"{address}: is a dataset; name a model, hf://ORG/NAME")
    try:
        path = pinned_path(address)
        files = _read_list(path, tokenizer_only=tokenizer_only) if path else []
        is_listed = bool(files)
        if not is_listed:
            commit = _commit(path) if path else None
            if path and not (commit or parsed.is_commit):
                raise UserError(
                    f"{address}: the lists of its files next to {path} are missing; run `tokamake "
                    f"fetch {address}` to pin the current commit"
                )
            files = list_model(_at(parsed, commit) or address, tokenizer_only=tokenizer_only)
        _check_form(files, address=address, tokenizer_only=tokenizer_only)
        if not is_listed:
            _write_list(parsed, files, tokenizer_only=tokenizer_only)
        if not path:
            link_revision(address, files[0])
            path = pinned_path(address)
        for file in files:
            _bring(file)
    except OSError as error:
        raise UserError(f"{address}: {of_system(error)}") from None
    assert path, "link_revision has linked it"
    return path


def _at(parsed: HubAddress, commit: str | None) -> str | None:
    return parsed._replace(revision=commit).text if commit else None


def _check_form(files: list[RemoteFile], *, address: str, tokenizer_only: bool) -> None:
    """Check that jobs can bring the weights of a model, or that they are here."""
    has_weights = tokenizer_only or any(map(comes_later, files))
    if not has_weights and not all(Path(file.path).exists() for file in files):
        raise UserError(
            f"{address}: has no {_SAFETENSORS} or {_PICKLED}; fetch it before you start: "
            f"`tokamake fetch {address}`"
        )


def _bring(file: RemoteFile) -> None:
    """Download a file unless it is there; weights come later."""
    link = Path(file.path)
    if link.exists():
        return
    if comes_later(file):
        link.unlink(missing_ok=True)  # gone from the cache; Snakemake takes a link for a file
    else:
        download(file)


def fetched_path(address: str, *, tokenizer_only: bool) -> Path:
    """Return the local path of an address, with the commit in the path.

    Weights may be missing: a job of the workflow brings them.
    """
    path = pinned_path(address)
    files = _read_list(path, tokenizer_only=tokenizer_only) if path else []
    if not (path and files):
        raise UserError(f"{address}: not fetched yet; {_GONE}, or run `tokamake fetch {address}`")
    for file in files:
        if not (comes_later(file) or Path(file.path).exists()):
            raise UserError(f"{address}: gone from the cache: {file.path}; {_GONE}")
    return path


def comes_later(file: RemoteFile) -> bool:
    """Whether a file holds weights, which a job brings."""
    name = Path(file.path).name
    return fnmatch(name, _SAFETENSORS) or fnmatch(name, _PICKLED)


def unfetched(path: Path) -> list[RemoteFile]:
    """Weights of the model in a folder that are listed and not downloaded, or gone."""
    files = filter(comes_later, _read_list(path, tokenizer_only=False))
    return [file for file in files if not Path(file.path).exists()]


def _write_list(parsed: HubAddress, files: list[RemoteFile], *, tokenizer_only: bool) -> None:
    commit = parse_address(files[0].url).revision
    path = Path(parsed.folder, commit[:COMMIT_DIGITS], parsed.path)
    content = {"commit": commit, "path": parsed.path, "files": [file._asdict() for file in files]}
    write_json(_list_of(path, tokenizer_only=tokenizer_only), content)


def _read_list(path: Path, *, tokenizer_only: bool) -> list[RemoteFile]:
    """Files that were listed for a path; none: it was not listed.

    A model has its tokenizer in its list, and a file in a list is known by itself.
    """
    if len(path.parts) < len(_MODELS.parts) + 3 or not path.is_relative_to(_MODELS):
        return []
    for only in (True, False) if tokenizer_only else (False,):
        file = _list_of(path, tokenizer_only=only)
        if file.is_file():
            files = _files_in(file)
            return [each for each in files if only or not tokenizer_only or not comes_later(each)]
    return [file for file in _all_listed(path) if Path(file.path) == path][:1]


def _list_of(path: Path, *, tokenizer_only: bool) -> Path:
    """File of the list for a path below the folder of a commit, or for that folder."""
    commit, *below = path.relative_to(_MODELS).parts[2:]
    scope = digest(["tokenizer" if tokenizer_only else "model", *below])[:8]
    return _MODELS.joinpath(*path.relative_to(_MODELS).parts[:2], f"{commit}.{scope}.json")


def _lists(path: Path) -> list[Path]:
    organization, name, commit, *_ = path.relative_to(_MODELS).parts
    return sorted((_MODELS / organization / name).glob(f"{commit}.*.json"))


def _commit(path: Path) -> str | None:
    lists = _lists(path)
    return _content(lists[0])["commit"] if lists else None


def _find_listed(parsed: HubAddress) -> RemoteFile | None:
    files = _all_listed(parsed.fetched)
    return next((file for file in files if parse_address(file.url) == parsed), None)


def _all_listed(path: Path) -> Iterator[RemoteFile]:
    return (file for each in _lists(path) for file in _files_in(each))


def _files_in(file: Path) -> list[RemoteFile]:
    return [RemoteFile(**entry) for entry in _content(file)["files"]]


def _content(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_json(file, "remove it, and run `tokamake fetch` again")
    return content
