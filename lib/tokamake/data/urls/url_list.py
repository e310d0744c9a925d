"""Lists of URLs in the table of corpora, urls:PATH, and the WARC files that their pages become."""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.readers import open_input
from tokamake.data.urls.cleaning import REASONS, clean, read_blacklist
from tokamake.errors import UserError
from tokamake.files import digest, sha256, write_json, write_text
from tokamake.remote.addresses import FOLDER, RemoteFile, cache_folder, check_names

PREFIX = "urls:"
_PAGE_BYTES = 16_000
"""Rough bytes of a compressed page; wrong ones only make shards uneven."""


class UrlShard(NamedTuple):
    """URLs whose pages make a WARC file."""

    number: int
    urls: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.urls).encode()).hexdigest()[:12]


def is_url_list(address: str) -> bool:
    return address.startswith(PREFIX)


def num_urls(file: RemoteFile) -> int:
    """Number of URLs of a planned WARC file."""
    return int(file.version.rpartition(" ")[2])


def list_version(address: str, settings: FetchUrlsSettings) -> str:
    """Version of the list: it changes with the file, its time, the blacklist and the shard size."""
    path = _path(address)
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{address}: cannot be read ({error.strerror}); fix the path") from None
    blacklist = settings.blacklist and sha256(_existing(settings.blacklist))
    rules = digest([blacklist, settings.default_blacklist, settings.urls_per_shard])
    return f"{status.st_size}:{status.st_mtime_ns} {rules}"


def list_url_shards(address: str, settings: FetchUrlsSettings) -> list[RemoteFile]:
    """Clean a list, and return a file for each shard of it, which does not exist yet."""
    version, path, counts = list_version(address, settings), _path(address), Counter[str]()
    files = []
    check_names([path.name], address)
    for shard in _clean_shards(path, settings, counts=counts):
        name = f"{FOLDER}/urls/{path.name}/{shard.number:05d}-{shard.digest}.warc.gz"
        count = len(shard.urls)
        url, size = f"{address}#{shard.number}", count * _PAGE_BYTES
        files.append(RemoteFile(url, name, size, f"{version} {count}"))
    print(f"tokamake: {_summary(path, counts)}", file=sys.stderr)
    if not files:
        raise UserError(f"{_summary(path, counts)}; nothing to fetch: fix the list")
    return files


def shard_urls(file: RemoteFile, settings: FetchUrlsSettings) -> tuple[str, ...]:
    """Return the URLs of a planned WARC file.

    The first call for a list writes the URLs of all its shards to the cache, and counts of what
    was left out to results/raw/urls/.
    """
    address = file.url.rpartition("#")[0]
    version = file.version.rpartition(" ")[0]
    path, kept = _path(address), cached_path(file).with_name(Path(file.path).name + "!urls")
    counted = Path(file.path).with_name(f"cleaned-{digest(version)[:12]}.json")
    if not (kept.exists() and counted.exists()):
        if list_version(address, settings) != version:
            raise UserError(f"{address}: changed since it was planned; start the workflow again")
        kept.parent.mkdir(parents=True, exist_ok=True)
        counts = Counter[str]()
        for shard in _clean_shards(path, settings, counts=counts):
            name = f"{shard.number:05d}-{shard.digest}.warc.gz!urls"
            write_text(kept.with_name(name), "\n".join(shard.urls))
        counted.parent.mkdir(parents=True, exist_ok=True)
        write_json(counted, {"list": str(path), "settings": version, **_numbers(counts)})
    if not kept.exists():
        raise UserError(f"{address}: changed since it was planned; start the workflow again")
    return tuple(kept.read_text(encoding="utf-8").split("\n"))


def cached_path(file: RemoteFile) -> Path:
    """Path of a WARC file in the cache that all workspaces share."""
    return cache_folder() / "tokamake" / Path(file.path).relative_to(FOLDER)


def _path(address: str) -> Path:
    return Path(address.removeprefix(PREFIX))


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"fetch_urls.blacklist: {path}: no such file; fix the path")
    return path


def _clean_shards(
    path: Path, settings: FetchUrlsSettings, *, counts: Counter[str]
) -> Iterator[UrlShard]:
    """Yield the shards of a list in its order, and count its lines: kept, and by reason."""
    blacklist = read_blacklist(settings.blacklist, with_default=settings.default_blacklist)
    seen: set[int] = set()
    urls: list[str] = []
    number = 0
    for line in _lines(path):
        try:
            url, reason = clean(line.decode(), blacklist)
        except UnicodeDecodeError:
            url, reason = "", "malformed"
        if url:
            hashed = int.from_bytes(hashlib.blake2b(url.encode(), digest_size=10).digest())
            reason = "repeated" if hashed in seen else "kept"
            seen.add(hashed)
        counts[reason] += 1
        if reason != "kept":
            continue
        urls.append(url)
        if len(urls) == settings.urls_per_shard:
            yield UrlShard(number, tuple(urls))
            urls, number = [], number + 1
    if urls:
        yield UrlShard(number, tuple(urls))


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a plain or compressed file; a line of a megabyte comes in pieces."""
    rest = b""
    for chunk in open_input(path, format="text").chunks():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if len(rest) > 1 << 20:
            yield rest
            rest = b""
    if rest:
        yield rest


def _numbers(counts: Counter[str]) -> dict[str, object]:
    left_out = {reason: counts[reason] for reason in REASONS if counts[reason]}
    return {"lines": counts.total(), "kept": counts["kept"], "left_out": left_out}


def _summary(path: Path, counts: Counter[str]) -> str:
    reasons = (f"{counts[reason]:,} {reason}" for reason in REASONS if counts[reason])
    left_out = ", ".join(reasons) or "none"
    return f"{path}: {counts.total():,} lines, {counts['kept']:,} URLs; left out: {left_out}"
