"""Cleaning of URLs: one form for equal addresses, and a reason for each URL that is left out."""

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from tokamake.data.urls.default_blacklist import DOMAINS, EXTENSIONS
from tokamake.errors import UserError

REASONS = ("blank", "short", "malformed", "scheme", "domain", "extension", "repeated")
"""Why a line of a list is left out."""
_SHORT = 8
"""URLs of this length or less are left out."""
_LONGEST = 2048
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})+")
_DOMAIN = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")
_EXTENSION = re.compile(r"\.[a-z0-9]+")


class Blacklist(NamedTuple):
    domains: frozenset[str]
    """Each stands for its subdomains, too."""
    extensions: frozenset[str]
    """In lower case, without a dot."""


def read_blacklist(path: Path | None, *, with_default: bool) -> Blacklist:
    """Read a blacklist: a domain or .extension a line; `with_default` adds the default list."""
    domains, extensions = (set(DOMAINS), set(EXTENSIONS)) if with_default else (set(), set())
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"fetch_urls.blacklist: {path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip().lower()
        if _EXTENSION.fullmatch(entry):
            extensions.add(entry[1:])
        elif _DOMAIN.fullmatch(entry):
            domains.add(entry)
        elif entry:
            raise UserError(
                f"{path}:{number}: {entry}: neither a domain nor an extension; write example.org "
                "or .pdf, one a line"
            )
    return Blacklist(frozenset(domains), frozenset(extensions))


def clean(text: str, blacklist: Blacklist) -> tuple[str, str]:
    """Return the URL of a line in its usual form, and why it is left out; one of them is empty.

    The usual form has no fragment and no default port; scheme and host are in lower case.
    """
    text = text.removeprefix("\ufeff").strip()
    if len(text) <= _SHORT:
        return "", "short" if text else "blank"
    if len(text) > _LONGEST or re.search(r"[\s\x00-\x1f\x7f\\<>\"]", text):
        return "", "malformed"
    try:
        parts = urlsplit(text)
        if "://" in text and parts.scheme and parts.scheme not in _PORTS:
            return "", "scheme"
        port = parts.port
        host = _ascii_host(parts.hostname or "")
    except ValueError:  # UnicodeError, too
        return "", "malformed"
    if parts.scheme not in _PORTS or "@" in parts.netloc:
        return "", "malformed"
    if is_listed(host, blacklist.domains):
        return "", "domain"
    if _extension(parts.path) in blacklist.extensions:
        return "", "extension"
    place = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{place}{parts.path or '/'}{query}", ""


def is_listed(host: str, domains: frozenset[str]) -> bool:
    """Whether a host is one of some domains, or below one."""
    labels = host.split(".")
    return any(".".join(labels[start:]) in domains for start in range(len(labels)))


def _ascii_host(host: str) -> str:
    """Return a host name as DNS has it; ValueError: no such name is possible."""
    if ":" in host:  # IPv6, which urlsplit has checked
        return f"[{host}]"
    name = host.rstrip(".")
    name = name if name.isascii() else name.encode("idna").decode("ascii")
    if not _HOST.fullmatch(name) or len(name) > 253:
        raise ValueError(host)
    return name.lower()


def _extension(path: str) -> str:
    """Return the extension of the last part of a path, in lower case; empty: it has none."""
    name = unquote(path).rstrip("/").rpartition("/")[2].partition(";")[0]
    _, dot, extension = name.rpartition(".")
    return extension.strip().lower() if dot else ""
