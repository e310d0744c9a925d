"""robots.txt (RFC 9309): which paths of a host a crawler may fetch.

`urllib.robotparser` knows no wildcards, and takes the first rule that matches in place of the
longest one.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit


class Robots(NamedTuple):
    """Rules of a host for one crawler."""

    rules: tuple[tuple[str, bool], ...] = ()
    """Pattern of paths, and whether it allows them."""
    delay: float = 0.0
    """Seconds between requests that the host asks for."""

    def allows(self, url: str) -> bool:
        """Whether a URL may be fetched: the longest pattern decides; of equals, one that allows."""
        parts = urlsplit(url)
        path = _escaped(parts.path or "/") + (f"?{_escaped(parts.query)}" if parts.query else "")
        matches = [
            (len(pattern), is_allowed)
            for pattern, is_allowed in self.rules
            if _matches(pattern, path)
        ]
        return max(matches)[1] if matches else True


def parse_robots(text: str, user_agent: str) -> Robots:
    """Return the rules for a crawler: of all groups that name it, or else of the groups for *."""
    product = user_agent.partition("/")[0].strip().lower()
    groups: dict[str, list[tuple[str, str]]] = {}
    agents: list[str] = []
    is_open = False  # whether further agents belong to the same group
    for line in text.lstrip("\ufeff").splitlines():
        name, colon, value = line.partition("#")[0].partition(":")
        name, value = name.strip().lower(), value.strip()
        if not colon:
            continue
        if name == "user-agent":
            agents = [*agents, value.lower()] if is_open else [value.lower()]
            is_open = True
            groups.setdefault(value.lower(), [])
        elif name in ("allow", "disallow", "crawl-delay"):
            is_open = False
            for agent in agents:
                groups[agent].append((name, value))
    lines = groups.get(product, groups.get("*", []))
    rules = [(value, name == "allow") for name, value in lines if name != "crawl-delay" and value]
    delays = [value for name, value in lines if name == "crawl-delay"]
    return Robots(
        tuple((_escaped(pattern), is_allowed) for pattern, is_allowed in rules),
        max((float(text) for text in delays if re.fullmatch(r"\d{1,9}(\.\d+)?", text)), default=0),
    )


def _escaped(path: str) -> str:
    """One form of all escapes of a path, so that equal paths are equal texts."""
    kept = "/?&=*$+,;:@!'()~-._[]"
    return "%2F".join(quote(unquote(part), safe=kept) for part in re.split("%2[fF]", path))


def _matches(pattern: str, path: str) -> bool:
    """Whether a pattern with * and a final $ matches the beginning of a path.

    No regular expression: strangers choose the pattern, and * upon * would take for ever.
    """
    is_end = pattern.endswith("$")
    first, *parts = pattern.removesuffix("$").split("*")
    if not path.startswith(first):
        return False
    place = len(first)
    for part in parts[:-1] if is_end else parts:
        place = path.find(part, place)
        if place < 0:
            return False
        place += len(part)
    if not is_end:
        return True
    last = parts[-1] if parts else ""
    return path.endswith(last) and len(path) - len(last) >= place if parts else len(path) == place
