"""Files of repositories on the Hugging Face Hub, by huggingface_hub.

An address is hf://datasets/ORG/NAME@REVISION/PATH for a dataset and hf://ORG/NAME@REVISION/PATH for
a model. The path may be a pattern or a folder. For a dataset without a path, the card
(README.md) says which files belong to a configuration and a split.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tokamake.errors import UserError, reason_of
from tokamake.files import glob_expression, sha256, write_link
from tokamake.remote.addresses import (
    COMMIT_DIGITS,
    FOLDER,
    FORM,
    HubAddress,
    RemoteFile,
    cache_folder,
    check_names,
    check_online,
    parse_address,
    shown,
)
from tokamake.remote.dataset_splits import files_of
from tokamake.remote.https import cache_path, is_finished, save

_MAX_ENTRIES = 2_000_000
"""Files and folders of a repository."""
_MAX_CARD_BYTES = 16 << 20
_MAX_ANSWER_BYTES = 64 << 20
"""A page of a listing has up to 1,000 files, some 300 kB."""
_MAX_ANSWERS = 10_000
_MAX_SECONDS = 300.0
"""Longest time that an answer may take."""
_TIMEOUT = 30.0
"""Seconds without a byte after which huggingface_hub tries again."""


def list_files(address: str) -> list[RemoteFile]:
    """List the files that an address names, with the commit that its revision is at now."""
    check_online(address, "list its files")
    parsed = parse_address(address)
    with explained(address), bounded_answers(address):
        commit, files = _tree(parsed, address=address)
    try:
        names = _named(parsed, files, commit=commit, address=address)
    except re.error as error:
        raise UserError(f"{address}: not a pattern ({error}); fix it") from None
    check_names(names, address)
    return [
        RemoteFile(
            parsed.at(commit, name),
            f"{parsed.folder}/{commit[:COMMIT_DIGITS]}/{name}",
            *files[name],
        )
        for name in names
    ]


def find(file: RemoteFile) -> Path | None:
    """Find a downloaded file in the cache of tokamake or of other tools of the Hub."""
    from huggingface_hub import try_to_load_from_cache

    parsed = parse_address(file.url)
    with explained(file.url):
        known = try_to_load_from_cache(
            parsed.repository,
            parsed.path,
            cache_dir=_cache(),
            revision=parsed.revision,
            repo_type=parsed.kind,
        )
    if isinstance(known, str) and Path(known).stat().st_size == file.size:
        return Path(known)
    path = cache_path(file)
    return path if is_finished(path, file) else None


def download(file: RemoteFile) -> Path:
    """Download a file into the cache, unless it or the cache of other Hub tools has the file."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if found := find(file):
        return found
    parsed = parse_address(file.url)
    with explained(file.url):
        url = hf_hub_url(
            parsed.repository,
            parsed.path,
            repo_type=parsed.kind,
            revision=parsed.revision,
            endpoint=endpoint(),
        )
        headers = build_hf_headers()
    path = cache_path(file)
    save(file, path, url=url, headers=headers, check=lambda partial: _check(partial, file))
    return path


def link_revision(address: str, file: RemoteFile) -> Path:
    """Link the name of a revision to its commit; return where the config finds the files."""
    parsed = parse_address(address)
    commit = parse_address(file.url).revision[:COMMIT_DIGITS]
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


def pinned_path(address: str) -> Path | None:
    """Return where files that an address names are put, with the commit in the path.

    None: its revision is the name of a branch or tag that nothing has resolved here. The path may
    not exist.
    """
    parsed = parse_address(address)
    link = Path(parsed.folder, parsed._replace(path="").fetched.name)
    if link.is_symlink():
        return link.with_name(str(link.readlink())) / parsed.path
    return link / parsed.path if parsed.is_commit else None


def _tree(parsed: HubAddress, *, address: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """Return the commit of a revision, and the size and version of each file by its path."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(endpoint=endpoint())
    files: dict[str, tuple[int, str]] = {}
    try:
        info = api.repo_info(parsed.repository, revision=parsed.revision, repo_type=parsed.kind)
        commit = str(info.sha)
        if not parsed._replace(revision=commit).is_commit:
            raise TypeError("no commit")
        entries = api.list_repo_tree(
            parsed.repository, recursive=True, revision=commit, repo_type=parsed.kind
        )
        for number, entry in enumerate(entries):
            if number == _MAX_ENTRIES:
                raise UserError(f"{address}: lists more than {number:,} files; download it by hand")
            if isinstance(entry, RepoFile):
                if entry.path in files:
                    raise UserError(f"{address}: lists {entry.path!r} twice; check HF_ENDPOINT")
                files[entry.path] = _facts(entry)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{address}: no answer of a Hub ({reason_of(error)}); check HF_ENDPOINT"
        ) from None
    return commit, files


def _facts(entry: Any) -> tuple[int, str]:
    """Size and version of a file; TypeError: they are no number and no hash."""
    size, version = entry.size, f"git:{entry.blob_id}"
    if entry.lfs:
        size, version = entry.lfs.size, f"sha256:{entry.lfs.sha256}"
    is_hash = re.fullmatch("git:[0-9a-f]{40}|sha256:[0-9a-f]{64}", version)
    if not (is_hash and type(size) is int and size >= 0 and isinstance(entry.path, str)):
        raise TypeError("a file without a name, size and hash")
    return size, version


def _named(
    parsed: HubAddress, files: dict[str, tuple[int, str]], *, commit: str, address: str
) -> list[str]:
    names = sorted(files)
    if not parsed.path and parsed.kind == "dataset":
        try:
            configs = _card_configs(parsed, files, commit=commit)
            return files_of(parsed, names, configs=configs, address=address)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{address}: the metadata in its README.md cannot be read ({error}); name files "
                "instead: hf://datasets/ORG/NAME/PATH"
            ) from None
    pattern = re.compile(glob_expression(parsed.path) if parsed.path else ".*")
    if chosen := [name for name in names if pattern.fullmatch(name)]:
        return chosen
    some = shown(names) or "no files"
    raise UserError(f"{address}: no file of the repository matches; it has {some}")


def _card_configs(
    parsed: HubAddress, files: dict[str, tuple[int, str]], *, commit: str
) -> list[dict[str, Any]]:
    import yaml
    from huggingface_hub import metadata_load

    if "README.md" not in files:
        return []
    path = f"{parsed.folder}/{commit[:COMMIT_DIGITS]}/README.md"
    card = RemoteFile(parsed.at(commit, "README.md"), path, *files["README.md"])
    if card.size > _MAX_CARD_BYTES:
        raise TypeError(f"{card.size:,} bytes")
    try:
        metadata = metadata_load(download(card)) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise TypeError(reason_of(error)) from None
    return [{"config_name": "default", **entry} for entry in metadata.get("configs") or []]


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
    header = b"blob %d\0" % path.stat().st_size
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.sha1(header)).hexdigest()


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
        raise UserError(f"{address}: {reason_of(error)}; {FORM}") from None
    except Exception as error:  # each package below raises its own errors of the network
        if not _is_of_network(error):
            raise
        raise UserError(f"{address}: {reason_of(error)}; check the network and rerun") from None


def _is_of_network(error: Exception) -> bool:
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & {"OSError", "HTTPError", "HfHubHTTPError", "TransportError"})


@contextmanager
def bounded_answers(address: str) -> Iterator[None]:
    """Bound the number, size and time of the answers that huggingface_hub reads in the block.

    Raises:
        UserError: an answer exceeds a bound, or is compressed.
    """
    from huggingface_hub import get_session, set_client_factory

    session = get_session()
    # Version 1 of huggingface_hub uses httpx, version 2 httpx2. Their names are the same.
    http: Any = sys.modules[type(session).__module__.partition(".")[0]]
    hooks, bounds = session.event_hooks, _AnswerBounds(address)

    class AnswerBody(http.SyncByteStream):
        """Bounded body of an answer; the client demands the base class."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __iter__(self) -> Iterator[bytes]:
            return bounds.read(self.stream)

        def close(self) -> None:
            self.stream.close()

    def bind(response: Any) -> None:
        bounds.check_coding(response)
        response.stream = AnswerBody(response.stream)

    bounded = {"request": [*hooks["request"], bounds.ask], "response": [*hooks["response"], bind]}
    certificates = _certificates(http, *map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))
    options = {"follow_redirects": True, "verify": certificates}
    set_client_factory(lambda: http.Client(event_hooks=bounded, **options))
    try:
        yield
    finally:
        set_client_factory(lambda: http.Client(event_hooks=hooks, timeout=None, **options))


@cache
def _certificates(http: Any, *_: str | None) -> Any:
    """TLS context of a package, by the variables that it reads; each client would read it again."""
    return http.create_ssl_context()


class _AnswerBounds:
    """Bounds on the answers to the requests for one address."""

    def __init__(self, address: str) -> None:
        self._address, self._requests = address, 0
        self._host = b""

    def ask(self, request: Any) -> None:
        """Count a request; bound its waits, which huggingface_hub does not.

        Only the first host gets the token.
        """
        self._requests += 1
        if "Authorization" in request.headers:
            self._host = self._host or request.url.netloc
            if request.url.netloc != self._host:
                raise self._error(f"its listing continues at another host, {request.url.host}")
        if self._requests > _MAX_ANSWERS:
            raise self._error(f"no end of its listing after {_MAX_ANSWERS:,} requests")
        request.headers["Accept-Encoding"] = "identity"  # 9 MB of gzip may hold 2 GB
        waits = dict.fromkeys(("connect", "read", "write", "pool"), _TIMEOUT)
        request.extensions["timeout"] = waits

    def check_coding(self, response: Any) -> None:
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise self._error("the answer is compressed, although asked not to be")

    def read(self, stream: Any) -> Iterator[bytes]:
        """Read a body up to the bounds."""
        size, end = 0, time.monotonic() + _MAX_SECONDS
        for part in stream:
            size += len(part)
            if size > _MAX_ANSWER_BYTES:
                raise self._error(f"an answer of more than {_MAX_ANSWER_BYTES >> 20} MiB")
            if time.monotonic() > end:
                raise self._error(f"an answer takes longer than {_MAX_SECONDS:g} seconds")
            yield part

    def _error(self, reason: str) -> UserError:
        return UserError(f"{self._address}: {reason}; check HF_ENDPOINT")
