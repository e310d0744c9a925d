"""Filter `pii`: replace personal data by fixed tags.

The tags and the rule about isbn, doi and # are from Dolma (arXiv:2402.00159). Each kind is
found in time linear in the text: a search for a literal (@, . or :), then bounded expressions
around it.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from ipaddress import ip_address
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from tokamake.data.filters import Document, DocumentFilter, Drop, out_of_bounds


class _Match(NamedTuple):
    """A piece of text to replace."""

    start: int
    end: int
    kind: str


class Filter(DocumentFilter):
    """Replace e-mail addresses, public IP addresses and US phone numbers by fixed tags."""

    emails: bool = True
    """Replace e-mail addresses."""
    ip_addresses: bool = True
    """Replace public IPv4 and IPv6 addresses; private, local and documentation addresses stay."""
    phone_numbers: bool = False
    """Replace phone numbers of the United States and Canada, such as (212) 555-0123."""
    email_tag: str = "|||EMAIL_ADDRESS|||"
    """Text in place of an e-mail address."""
    ip_address_tag: str = "|||IP_ADDRESS|||"
    """Text in place of an IP address."""
    phone_number_tag: str = "|||PHONE_NUMBER|||"
    """Text in place of a phone number."""
    max_matches: Annotated[int, Field(ge=0)] | None = None
    """Drop documents with more matches; null: drop none. Dolma has 5."""
    context_characters: Annotated[int, Field(ge=0)] = 100
    """Keep an IP address or phone number if isbn, doi or # is within so many characters of it."""

    @model_validator(mode="after")
    def _check_kinds(self) -> "Filter":
        if not self._tags:
            raise ValueError("nothing to replace; set emails, ip_addresses or phone_numbers")
        return self

    @cached_property
    def _tags(self) -> dict[str, str]:
        """Tag of each kind that is replaced, in their order of precedence."""
        tags = {
            "e-mail addresses": (self.emails, self.email_tag),
            "IP addresses": (self.ip_addresses, self.ip_address_tag),
            "phone numbers": (self.phone_numbers, self.phone_number_tag),
        }
        return {kind: tag for kind, (is_replaced, tag) in tags.items() if is_replaced}

    def apply(self, document: Document) -> Drop | None:
        """Replace all matches; the number of a drop is how many there are."""
        matches = self._matches(document.text)
        if drop := out_of_bounds("number of matches", len(matches), most=self.max_matches):
            return drop
        if matches:
            document.text = self._replace(document.text, matches)
            for _, _, kind in matches:
                document.metrics[kind] = document.metrics.get(kind, 0) + 1
        return None

    def _matches(self, text: str) -> list[_Match]:
        """Find all kinds in the raw text. If two overlap, the first one stays."""
        found = [
            _Match(*span, kind)
            for kind in self._tags
            for span in _FINDERS[kind](text)
            if kind == "e-mail addresses" or not self._is_another_number(text, span)
        ]
        matches: list[_Match] = []
        for match in sorted(found, key=lambda match: match.start):  # stable: by kind then
            if not matches or match.start >= matches[-1].end:
                matches.append(match)
        return matches

    def _is_another_number(self, text: str, span: tuple[int, int]) -> bool:
        """Whether the context of a number names another meaning."""
        (start, end), width = span, self.context_characters
        before, after = text[max(0, start - width) : start], text[end : end + width]
        return any(map(_OTHER_NUMBER.search, (before, after)))

    def _replace(self, text: str, matches: list[_Match]) -> str:
        parts: list[str] = []
        position = 0
        for start, end, kind in matches:
            parts += text[position:start], self._tags[kind]
            position = end
        return "".join([*parts, text[position:]])


_OTHER_NUMBER = re.compile(r"#|(?<![A-Za-z])(?:isbn|doi)(?![A-Za-z])", re.IGNORECASE)

_LETTER = "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"  # of Latin scripts, and digits
_LOCAL_PART_REVERSED = re.compile(rf"[{_LETTER}_%+'~-]++(?:\.[{_LETTER}_%+'~-]++)*+")
_LABEL = f"[{_LETTER}]++(?:-++[{_LETTER}]++)*+"
_DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})++|\[(?:[0-9]{{1,3}}\.){{3}}[0-9]{{1,3}}\]")
_TOP_LEVEL_DOMAIN = re.compile(r"[A-Za-z][A-Za-z0-9-]+")
_LONGEST_LOCAL_PART = 64  # RFC 5321
_LONGEST_DOMAIN = 255


def _emails(text: str) -> Iterator[tuple[int, int]]:
    """Find e-mail addresses around each @, without quotes and signs before the name."""
    at, previous_end = text.find("@"), 0
    while at >= 0:
        before = text[max(previous_end, at - _LONGEST_LOCAL_PART - 1) : at]
        local_part = _LOCAL_PART_REVERSED.match(before[::-1])
        name = local_part[0].rstrip("%+'~-.") if local_part else ""
        end = _domain_end(text, at + 1) if 0 < len(name) <= _LONGEST_LOCAL_PART else 0
        if end:
            yield at - len(name), end
            previous_end = end
        at = text.find("@", max(at + 1, end))


def _domain_end(text: str, start: int) -> int:
    """End of the domain at `start`; 0 if there is none. Its last label is a name: not x@1.8."""
    domain = _DOMAIN.match(text, start, start + _LONGEST_DOMAIN)
    if domain is None or domain[0].startswith("["):
        return domain.end() if domain else 0
    labels = domain[0].split(".")
    while labels and not _TOP_LEVEL_DOMAIN.fullmatch(labels[-1]):
        labels.pop()
    return start + len(".".join(labels)) if len(labels) > 1 else 0


# From the dot after the first number: regular expressions find a literal fastest.
_IPV4_REST = re.compile(r"\.(?<=[0-9]\.)[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(?![A-Za-z0-9_]|\.[0-9])")
_IPV4_FIRST_REVERSED = re.compile(r"[0-9]{1,3}(?![A-Za-z0-9_]|\.[0-9])")
# Public addresses begin with 2 or 3 (RFC 4291): a::b and abc::def are names in programs.
_IPV6 = re.compile(
    r":(?<=(?<![A-Za-z0-9_:.])[23][0-9A-Fa-f]{3}:)[0-9A-Fa-f:]{1,34}(?![A-Za-z0-9_:])"
)
_IPV6_FIRST = 4  # digits before the first colon


def _ip_addresses(text: str) -> Iterator[tuple[int, int]]:
    """Find public IP addresses that are not part of a longer number, a word or a version."""
    for match in _IPV4_REST.finditer(text):
        before = text[max(0, match.start() - 5) : match.start()]
        if first := _IPV4_FIRST_REVERSED.match(before[::-1]):
            start = match.start() - first.end()
            if _is_public(text[start : match.end()]):
                yield start, match.end()
    for match in _IPV6.finditer(text):
        start, end = match.start() - _IPV6_FIRST, match.end()
        if text[end - 1] == ":" and text[end - 2] != ":":
            end -= 1  # punctuation
        if _is_public(text[start:end]):
            yield start, end


def _is_public(address: str) -> bool:
    try:
        return ip_address(address).is_global
    except ValueError:
        return False


# Area code and exchange begin with 2 to 9. Ten digits without separators need +1: many of them are
# not phone numbers.
_PHONE_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.+-])"
    r"(?:\+1[2-9][0-9]{2}[2-9][0-9]{6}"
    r"|(?:\+?1[-. ])?(?:\([2-9][0-9]{2}\)[-. ]?|[2-9][0-9]{2}[-. ])[2-9][0-9]{2}[-. ][0-9]{4})"
    r"(?![A-Za-z0-9_]|[.-][0-9])"
)


def _phone_numbers(text: str) -> Iterator[tuple[int, int]]:
    return (match.span() for match in _PHONE_NUMBER.finditer(text))


_FINDERS = {
    "e-mail addresses": _emails,
    "IP addresses": _ip_addresses,
    "phone numbers": _phone_numbers,
}
