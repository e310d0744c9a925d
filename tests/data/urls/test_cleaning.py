"""URLs are brought to one form or left out for one reason."""

from pathlib import Path

import pytest

from tokamake.data.urls.cleaning import clean, read_blacklist
from tokamake.errors import UserError

DEFAULT = read_blacklist(None, with_default=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "blank"),
        ("  \r", "blank"),
        ("http://a", "short"),
        ("http://a.b", ""),
        ("example.org/page", "malformed"),
        ("http:///page.html", "malformed"),
        ("http://nodots/page", "malformed"),
        ("http://[::1/page", "malformed"),
        ("http://example.org:port/", "malformed"),
        ("http://me:secret@example.org/", "malformed"),
        ("http://example.org/a b", "malformed"),
        ("http://-a.example.org/", "malformed"),
        (f"http://example.org/{'a' * 3000}", "malformed"),
        ("ftp://example.org/page", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("https://www.youtube.com/watch?v=1", "domain"),
        ("https://YOUTUBE.com./watch", "domain"),
        ("https://notyoutube.com/watch", ""),
        ("https://example.org/youtube.com", ""),
        # Bugs of other cleaners: a missing comma let these two pass, and #part hid extensions.
        ("https://example.org/a.7z", "extension"),
        ("https://example.org/a.ai", "extension"),
        ("https://example.org/a.PDF#page=3", "extension"),
        ("https://example.org/a.jpg?size=large", "extension"),
        ("https://example.org/a.jpg/", "extension"),
        ("https://example.org/a.%6Apg", "extension"),
        ("https://example.org/a.mp3;v=1", "extension"),
        ("https://example.org/?file=a.pdf", ""),
        ("https://example.org/a.pdf/comments", ""),
        ("https://example.ai", ""),
        ("https://example.zip/page", ""),
    ],
)
def test_a_line_is_kept_or_left_out_for_a_reason(text: str, reason: str) -> None:
    url, found = clean(text, DEFAULT)
    assert (found, bool(url)) == (reason, not reason)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("HTTP://Example.ORG:80", "http://example.org/"),
        ("\ufeffhttp://example.org/a\r", "http://example.org/a"),
        ("https://example.org:443/A?b=C#part", "https://example.org/A?b=C"),
        ("https://example.org:8443/", "https://example.org:8443/"),
        ("https://bücher.example/ä", "https://xn--bcher-kva.example/ä"),
        ("http://[2001:DB8::1]/", "http://[2001:db8::1]/"),
    ],
)
def test_equal_addresses_have_one_form(text: str, url: str) -> None:
    assert clean(text, DEFAULT) == (url, "")
    assert clean(url, DEFAULT) == (url, "")


def test_a_file_adds_domains_and_extensions(tmp_path: Path) -> None:
    path = tmp_path / "blacklist.txt"
    path.write_text("# mine\nNews.example.org  # paywall\n.TXT\n\n")
    blacklist = read_blacklist(path, with_default=False)
    assert blacklist == ({"news.example.org"}, {"txt"})
    assert clean("http://a.news.example.org/", blacklist)[1] == "domain"
    assert clean("http://example.org/a.txt", blacklist)[1] == "extension"
    assert clean("http://example.org/a.pdf", blacklist)[1] == ""
    both = read_blacklist(path, with_default=True)
    assert both.domains > DEFAULT.domains
    assert both.extensions > DEFAULT.extensions


def test_other_lines_of_the_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "blacklist.txt"
    path.write_text("example.org\nhttps://example.org/\n")
    with pytest.raises(UserError, match=r"blacklist.txt:2: https://example.org/: neither a domain"):
        read_blacklist(path, with_default=True)
    with pytest.raises(UserError, match=r"fetch_urls.blacklist: .*cannot be read"):
        read_blacklist(tmp_path / "none.txt", with_default=True)
