"""Small dumps of a wiki, as MediaWiki writes them: one XML file, in one bz2 stream or several."""

import bz2
from xml.sax.saxutils import escape, quoteattr

from tests.support.wikitext_cases import CASES

HEADER = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>testwiki</dbname>
    <base>https://test.wikipedia.org/wiki/Main_Page</base>
    <case>first-letter</case>
    <namespaces>
      <namespace key="-1" case="first-letter">Spezial</namespace>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Diskussion</namespace>
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="10" case="first-letter">Vorlage</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
FOOTER = "</mediawiki>\n"


def page(
    number: int, title: str, text: str, *, ns: int | None = 0, redirect: str = "", more: str = ""
) -> str:
    """A page with one revision, whose id is ten times the page's id; `more` follows it."""
    size = len(text.encode())
    return f"""  <page>
    <title>{escape(title)}</title>
{"" if ns is None else f"    <ns>{ns}</ns>"}
    <id>{number}</id>
{f"    <redirect title={quoteattr(redirect)} />" if redirect else ""}
    <revision>
      <id>{number * 10}</id>
      <parentid>3</parentid>
      <timestamp>2024-01-01T00:00:00Z</timestamp>
      <contributor><username>A writer</username><id>77</id></contributor>
      <comment>/* {escape("a & b")} */</comment>
      <model>wikitext</model>
      <format>text/x-wiki</format>
      <text bytes="{size}" sha1="x" xml:space="preserve">{escape(text)}</text>
      <sha1>x</sha1>
    </revision>
{more}  </page>
"""


def pages_of(num_articles: int) -> list[str]:
    """Articles of every kind of markup, between talk pages and redirects."""
    pages = []
    for number in range(num_articles):
        text = f"'''Article {number}''' has [[words]].\n\n" + list(CASES)[number % len(CASES)]
        pages.append(page(3 * number + 10, f"Title {number} & Söhne", text))
        pages.append(page(3 * number + 11, f"Diskussion:Title {number}", "talk", ns=1))
        pages.append(page(3 * number + 12, f"Old {number}", "#REDIRECT [[x]]", redirect="x"))
    return pages


def xml(pages: list[str]) -> bytes:
    return (HEADER + "".join(pages) + FOOTER).encode()


def multistream(pages: list[str], *, pages_a_stream: int) -> bytes:
    """As Wikimedia writes it: a stream for the header, for each few pages, and for the footer."""
    parts = [HEADER, *map("".join, batched_pages(pages, pages_a_stream)), FOOTER]
    return b"".join(bz2.compress(part.encode()) for part in parts)


def batched_pages(pages: list[str], size: int) -> list[list[str]]:
    return [pages[first : first + size] for first in range(0, len(pages), size)]


def cut_anywhere(data: bytes, size: int) -> bytes:
    """As pbzip2 compresses: streams that end at any byte."""
    return b"".join(bz2.compress(data[start : start + size]) for start in range(0, len(data), size))
