"""Files of repositories on the Hugging Face Hub, by huggingface_hub.

An address is hf://datasets/ORG/NAME@REVISION/PATH for a dataset and hf://ORG/NAME@REVISION/PATH for
a model. The path may be a pattern or a folder. Of a dataset without a path, the card (README.md)
says which files belong to a configuration and a split.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from tokamake.errors import UserError
from tokamake.files import glob_expression, sha256, write_link
from tokamake.remote.https import save
from tokamake.remote.remote_file import FOLDER, RemoteFile, cache_folder, check_online

_SPLIT_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
"""Words in paths that name a split, if a card names no files; `datasets` takes the same."""
_DATA = re.compile(r"\.(jsonl?|ndjson|parquet|arrow)(\.(gz|zst|xz|bz2))?$")
"""Ends of names of data, where neither the user nor a card names the files."""
_TABLES = re.compile(r"\.(csv|tsv)(\.(gz|zst|xz|bz2))?$")
"""The same for tables of text. Beside other data, they are statistics and the like."""
_ARCHIVES = re.compile(r"\.(zip|tgz|tar(\.(gz|zst|xz|bz2))?)$")
"""The same for archives. Beside other data, they hold pictures, or the same data."""
_CONVERTED = "refs/convert/parquet"
"""Revision to which the Hub converts datasets; its files are CONFIG/SPLIT/0000.parquet."""
_COMMIT_DIGITS = 12
"""Digits of a commit in the names of folders."""
_FORM = "write hf://datasets/ORG/NAME@REVISION/PATH, or without datasets/ for a model"


class HubAddress(NamedTuple):
    """Parts of an address."""

    kind: str
    """dataset or model."""
    repository: str
    """ORG/NAME."""
    revision: str
    """Branch, tag or commit."""
    path: str
    """File, folder or pattern; empty: the whole repository, or what the card names."""
    config: str = ""
    """Configuration of a dataset; empty: its default."""
    split: str = ""
    """Split of a dataset; empty: train."""

    @property
    def folder(self) -> str:
        """Folder of links to the files, without the commit."""
        return f"{FOLDER}/hub/{self.kind}s/{self.repository}"

    @property
    def fetched(self) -> Path:
        """Path of what `tokamake fetch` has fetched for the address."""
        is_commit = re.fullmatch("[0-9a-f]{40}", self.revision)
        name = self.revision[:_COMMIT_DIGITS] if is_commit else quote(self.revision, safe="")
        return Path(self.folder, name, self.path)

    def at(self, commit: str, path: str) -> str:
        """Address of a file at a commit."""
        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"hf://{prefix}{self.repository}@{commit}/{quote(path, safe='/ ')}"


def parse_address(address: str) -> HubAddress:
    """Parse an address.

    Raises:
        UserError: it has another form.
    """
    text, _, query = address.removeprefix("hf://").partition("?")
    kind = "dataset" if text.startswith("datasets/") else "model"
    match = re.fullmatch(
        r"([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.*))?", text.removeprefix("datasets/")
    )
    options = dict(parse_qsl(query))
    if not match or text.startswith(("spaces/", "models/")) or options.keys() - {"config", "split"}:
        raise UserError(f"{address}: {_FORM}")
    repository, revision, path = match.groups(default="")
    if options and (path or kind == "model"):
        raise UserError(f"{address}: config and split are of a dataset without a path; {_FORM}")
    return HubAddress(
        kind, repository, unquote(revision) or "main", unquote(path.strip("/")), **options
    )


def list_files(address: str) -> list[RemoteFile]:
    """List the files that an address names, with the commit that its revision is at now.

    Raises:
        UserError: there is no such repository, revision or file, or no network.
    """
    check_online(address, "list its files")
    parsed = parse_address(address)
    with explained(address):
        commit, files = _tree(parsed)
    try:
        names = _named(parsed, files, commit=commit, address=address)
    except re.error as error:
        raise UserError(f"{address}: not a pattern ({error}); fix it") from None
    return [
        RemoteFile(
            parsed.at(commit, name),
            f"{parsed.folder}/{commit[:_COMMIT_DIGITS]}/{name}",
            *_facts(files[name]),
        )
        for name in names
    ]


def download(file: RemoteFile) -> Path:
    """Download a file into the cache, or find it there or in that of other tools of the Hub.

    Raises:
        UserError: it cannot be downloaded, or differs from what was listed.
    """
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers

    parsed = parse_address(file.url)
    with explained(file.url):
        known = try_to_load_from_cache(
            parsed.repository,
            parsed.path,
            cache_dir=_cache(),
            revision=parsed.revision,
            repo_type=parsed.kind,
        )
        url = hf_hub_url(
            parsed.repository,
            parsed.path,
            repo_type=parsed.kind,
            revision=parsed.revision,
            endpoint=endpoint(),
        )
        headers = build_hf_headers()
    if isinstance(known, str) and Path(known).stat().st_size == file.size:
        return Path(known)
    path = cache_folder() / "tokamake" / Path(file.path).relative_to(FOLDER)
    save(file, path, url=url, headers=headers, check=lambda partial: _check(partial, file))
    return path


def link_revision(address: str, file: RemoteFile) -> Path:
    """Link the name of a revision to the folder of its commit.

    Args:
        address: with the revision.
        file: one of its files, which is downloaded.

    Returns:
        Where the config finds what the address names.
    """
    parsed = parse_address(address)
    commit = parse_address(file.url).revision[:_COMMIT_DIGITS]
    link = Path(parsed.folder, parsed._replace(path="").fetched.name)
    if link.name != commit:
        write_link(link, commit)
    return parsed.fetched


def repository_of(path: Path) -> str | None:
    """Return ORG/NAME of a model that `tokamake fetch` has put at a path; None: another path."""
    parts = Path(os.path.relpath(path)).parts
    folder = Path(FOLDER, "hub/models").parts
    is_inside = parts[: len(folder)] == folder and len(parts) > len(folder) + 2
    return "/".join(parts[len(folder) : len(folder) + 2]) if is_inside else None


def fetched_path(address: str) -> Path:
    """Return where `tokamake fetch` has put what an address names, with the commit in the path.

    Raises:
        UserError: it has not fetched it, or the cache was emptied.
    """
    parsed = parse_address(address)
    link = Path(parsed.folder, parsed._replace(path="").fetched.name)
    folder = link.with_name(str(link.readlink())) if link.is_symlink() else link
    path = folder / parsed.path
    is_whole = path.is_dir() and all(file.exists() for file in path.rglob("*"))
    if not (path.is_file() or is_whole):
        state = "gone from the cache" if path.is_symlink() or path.is_dir() else "not fetched yet"
        raise UserError(
            f"{address}: {state}: {path}; run `tokamake fetch {address}` here, on a node with a "
            "network (with --tokenizer, only the tokenizer comes)"
        )
    return path


def _tree(parsed: HubAddress) -> tuple[str, dict[str, Any]]:
    """Return the commit of a revision, and huggingface_hub's record of each file by its path."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(endpoint=endpoint())
    info = api.repo_info(parsed.repository, revision=parsed.revision, repo_type=parsed.kind)
    commit = str(info.sha)
    entries = api.list_repo_tree(
        parsed.repository, recursive=True, revision=commit, repo_type=parsed.kind
    )
    return commit, {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _facts(entry: Any) -> tuple[int, str]:
    """Size and version of a file."""
    if entry.lfs:
        return entry.lfs.size, f"sha256:{entry.lfs.sha256}"
    return entry.size, f"git:{entry.blob_id}"


def _named(parsed: HubAddress, files: dict[str, Any], *, commit: str, address: str) -> list[str]:
    """Return the files that an address names."""
    names = sorted(files)
    if not parsed.path and parsed.kind == "dataset":
        try:
            configs = _card_configs(parsed, files, commit=commit)
            return _of_configs(parsed, names, configs=configs, address=address)
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{address}: the metadata in its README.md cannot be read ({error}); name files "
                "instead: hf://datasets/ORG/NAME/PATH"
            ) from None
    pattern = re.compile(glob_expression(parsed.path) if parsed.path else ".*")
    if chosen := [name for name in names if pattern.fullmatch(name)]:
        return chosen
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
    raise UserError(f"{address}: no file of the repository matches; it has {shown or 'no files'}")


def _of_configs(
    parsed: HubAddress, names: list[str], *, configs: list[dict[str, Any]], address: str
) -> list[str]:
    """Return the files of a configuration and a split of a dataset."""
    is_converted = parsed.revision == _CONVERTED
    if is_converted:
        configs = _converted_configs(names)
    chosen = _choose_config(configs, parsed.config, address=address)
    if chosen:
        patterns = _split_patterns(chosen["data_files"], chosen.get("data_dir", ""))
        splits = {split: _match(members, names) for split, members in patterns.items()}
    elif _script(parsed) in names and not any(map(_DATA.search, names)):
        raise UserError(
            f"{address}: a script makes this dataset, and tokamake runs none; the Hub may have "
            f"converted it: hf://datasets/{parsed.repository}@refs%2Fconvert%2Fparquet"
        )
    else:
        splits = _splits_by_name(names)
    split = parsed.split or "train"
    if is_converted and not splits.get(split) and splits.get(f"partial-{split}"):
        raise UserError(
            f"{address}: the Hub has converted only a part of split {split}; "
            f"?split=partial-{split} takes it"
        )
    if splits.get(split):
        return splits[split]
    raise UserError(
        f"{address}: no file of split {split}; it has the splits {', '.join(splits) or 'none'}; "
        "add ?split=NAME, or name files: hf://datasets/ORG/NAME/PATH"
    )


def _card_configs(
    parsed: HubAddress, files: dict[str, Any], *, commit: str
) -> list[dict[str, Any]]:
    """Configurations that a card names, with their files."""
    import yaml
    from huggingface_hub import metadata_load

    if "README.md" not in files:
        return []
    path = f"{parsed.folder}/{commit[:_COMMIT_DIGITS]}/README.md"
    card = RemoteFile(parsed.at(commit, "README.md"), path, *_facts(files["README.md"]))
    try:
        metadata = metadata_load(download(card)) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise TypeError(_first_line(error)) from None
    configs = [entry for entry in metadata.get("configs") or [] if "data_files" in entry]
    return [{"config_name": "default", **entry} for entry in configs]


def _converted_configs(names: list[str]) -> list[dict[str, Any]]:
    """Return configurations as a card would name them, from folders CONFIG/SPLIT."""
    configs: dict[str, dict[str, str]] = {}
    for name in names:
        match name.split("/"):
            case [config, split, _]:
                configs.setdefault(config, {})[split] = f"{config}/{split}/*.parquet"
    return [
        {
            "config_name": config,
            "data_files": [{"split": split, "path": path} for split, path in splits.items()],
        }
        for config, splits in configs.items()
    ]


def _script(parsed: HubAddress) -> str:
    """Name of the script that makes a dataset, if there is one."""
    return f"{parsed.repository.partition('/')[2]}.py"


def _choose_config(
    configs: list[dict[str, Any]], name: str, *, address: str
) -> dict[str, Any] | None:
    """Return a configuration; None: the card names none."""
    known = ", ".join(config["config_name"] for config in configs)
    if name:
        chosen = [config for config in configs if config["config_name"] == name]
        if not chosen:
            raise UserError(f"{address}: no configuration {name}; choose one of {known or 'none'}")
        return chosen[0]
    defaults = [c for c in configs if c.get("default") or c["config_name"] == "default"]
    if len(configs) > 1 and not defaults:
        raise UserError(f"{address}: has the configurations {known}; add ?config=NAME")
    return next(iter(defaults or configs), None)


def _split_patterns(data_files: Any, folder: str) -> dict[str, list[str]]:
    """Patterns of each split, from the forms that a card may have."""
    if isinstance(data_files, str):
        data_files = [data_files]
    splits: dict[str, list[str]] = {}
    for item in data_files:
        entry = {"split": "train", **(item if isinstance(item, dict) else {"path": item})}
        paths = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
        splits.setdefault(entry["split"], []).extend(
            f"{folder}/{path}".lstrip("/") if folder else path for path in paths
        )
    return splits


def _match(patterns: Iterable[str], names: list[str]) -> list[str]:
    expressions = [re.compile(glob_expression(pattern)) for pattern in patterns]
    return [name for name in names if any(e.fullmatch(name) for e in expressions)]


def _splits_by_name(names: list[str]) -> dict[str, list[str]]:
    """Files of each split by words in their paths; without such words, all are for training."""
    kinds = ([n for n in names if kind.search(n)] for kind in (_DATA, _TABLES, _ARCHIVES))
    data = next(filter(None, kinds), [])
    splits = {}
    for split, words in _SPLIT_WORDS.items():
        expression = re.compile(rf"(^|[-_./ ])({words})([-_./ 0-9]|$)")
        if members := [name for name in data if expression.search(name)]:
            splits[split] = members
    return splits or {"train": data}


def _check(partial: Path, file: RemoteFile) -> None:
    """Compare a complete download with the hash that was listed; empty it if it differs."""
    kind, _, expected = file.version.partition(":")
    actual = (sha256 if kind == "sha256" else _git_hash)(partial)
    if actual != expected:
        partial.write_bytes(b"")
        raise UserError(
            f"{file.url}: the download has the hash {actual}, but {expected} was listed; it is "
            "removed: run again"
        )


def _git_hash(path: Path) -> str:
    """Hash of a file as git computes it."""
    content = path.read_bytes()  # files outside Git LFS are small
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE", cache_folder() / "hub")).expanduser()


def endpoint() -> str | None:
    """Address of the Hub, or of a mirror; None: the library's default."""
    # huggingface_hub reads it once, when it is imported.
    return os.environ.get("HF_ENDPOINT")


@contextmanager
def explained(address: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into one line."""
    from huggingface_hub import errors

    token = "set HF_TOKEN, or log in with `hf auth login`, and accept its terms on its page"
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(f"{address}: access is restricted; {token}") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{address}: no such revision; fix it") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{address}: no such repository, or a private one; fix the name, or {token}"
        ) from None
    except errors.EntryNotFoundError:
        raise UserError(f"{address}: no such file at this commit; fix the address") from None
    except json.JSONDecodeError:
        raise UserError(f"{address}: the answer is no JSON; check HF_ENDPOINT") from None
    except ValueError as error:
        raise UserError(f"{address}: {_first_line(error)}; {_FORM}") from None
    except Exception as error:  # each package below raises its own errors of the network
        if not _is_of_network(error):
            raise
        raise UserError(f"{address}: {_first_line(error)}; check the network and rerun") from None


def _is_of_network(error: Exception) -> bool:
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & {"OSError", "HTTPError", "HfHubHTTPError", "TransportError"})


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
