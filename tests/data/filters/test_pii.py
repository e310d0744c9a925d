"""Personal data become tags; other numbers and names stay."""

import re
import time
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tokamake.data.filters import Document
from tokamake.data.filters.pii import Filter

EVERY = Filter(phone_numbers=True, email_tag="E", ip_address_tag="I", phone_number_tag="P")


def replaced(text: str, pii: Filter = EVERY) -> str:
    document = Document(text, {})
    assert pii.apply(document) is None
    return document.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to jane.doe+x@mail-1.example.co.uk.", "write to E."),
        ("<a@b.org>, 'a@b.org' and (a@b.org)", "<E>, 'E' and (E)"),
        ("mailto:a@b.org?subject=x", "mailto:E?subject=x"),
        ("http://user:secret@host.com/", "http://user:E/"),
        ("a@b.com@c.com", "E@c.com"),
        ("o'brien@b.ie, .dot@b.ie, two..dots@b.ie", "E, .E, two..E"),
        ("邮箱a@b.cn。 jürgen@müller.de", "邮箱E。 E"),
        ("postmaster@[8.8.8.8]", "E"),
        (f"{'x' * 64}@b.com", "E"),
        # No addresses: handles, versions, labels that are no names.
        ("https://medium.com/@user.name", None),
        ("react@16.8.0 or vue@3.2.1-beta.4", None),
        ("a@b @ c.com, a@b..com, a@-b.com, a.@b.com, a@b.c", None),
        (f"{'x' * 65}@b.com", None),
    ],
)
def test_emails(text: str, expected: str | None) -> None:
    assert replaced(text) == (text if expected is None else expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.8.8.8", "I"),
        ("from 8.8.8.8:53, 8.8.4.4/32 to 1.1.1.1.", "from I:53, I/32 to I."),
        ("8.8.8.8-8.8.4.4", "I-I"),
        ("地址8.8.8.8是", "地址I是"),
        ("2606:4700:4700::1111, [2a00:1450::8]:443", "I, [I]:443"),
        ("at 2606:4700:4700::1111: refused", "at I: refused"),
        ("2606:4700:0:0:0:0:0:1111/64", "I/64"),
        ("::ffff:8.8.8.8", "::ffff:I"),
        # Longer numbers, versions, and what is no address.
        ("1234.5.6.7.8 5.6.7.1234 1.2.3.4.5 v8.8.8.8 8.8.8.8b 999.8.8.8 8.8.8.08", None),
        ("a::b std::string abc::def 12:30:45 00:1b:63:84:45:e6 2606:4700:::1", None),
        ("2606:4700:4700::1111:2:3:4:5:6:7:8 2606:4700::11112", None),
        # Private, local, reserved for documentation, of one link, for several receivers.
        ("192.168.0.1 10.1.2.3 172.16.0.1 127.0.0.1 169.254.1.1 0.0.0.0 192.0.2.7", None),
        ("2001:db8::1 fe80::1 fc00::1 ::1", None),
    ],
)
def test_ip_addresses(text: str, expected: str | None) -> None:
    assert replaced(text) == (text if expected is None else expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(212) 555-0123, (212)555-0123 or 212-555-0123", "P, P or P"),
        ("+1 212-555-0123, +12125550123, 1-800-555-0123, 212.555.0123.", "P, P, P, P."),
        ("2125550123 112-555-0123 212-155-0123 212-555-01234 3212-555-0123", None),
        ("2024-212-555-0123 212-555-0123-4 1.212.555.0123.9 +49 212 5550123", None),
    ],
)
def test_phone_numbers(text: str, expected: str | None) -> None:
    assert replaced(text) == (text if expected is None else expected)


def test_numbers_near_other_meanings_stay() -> None:
    for text in ("ISBN 8.8.8.8", "doi: 8.8.8.8", "8.8.8.8 #", "# 212-555-0123"):
        assert replaced(text) == text
    assert replaced("doing 8.8.8.8") == "doing I"
    assert replaced("# a@b.org") == "# E"
    far = f"#{'x' * 99} 8.8.8.8"
    assert replaced(far) == far[:-7] + "I"
    assert replaced("# 8.8.8.8", Filter(context_characters=0)) == "# |||IP_ADDRESS|||"


def test_tags_counts_and_kinds() -> None:
    document = Document("a@b.org, c@d.org, 8.8.8.8, 212-555-0123", {})
    assert Filter().apply(document) is None
    email, ip = "|||EMAIL_ADDRESS|||", "|||IP_ADDRESS|||"
    assert document.text == f"{email}, {email}, {ip}, 212-555-0123"
    assert document.metrics == {"e-mail addresses": 2, "IP addresses": 1}
    assert replaced("a@b.org 8.8.8.8", Filter(emails=False)) == f"a@b.org {ip}"
    assert replaced("a@b.org 8.8.8.8", Filter(ip_addresses=False)) == f"{email} 8.8.8.8"
    with pytest.raises(ValidationError, match="nothing to replace; set emails, ip_addresses or"):
        Filter(emails=False, ip_addresses=False)


def test_a_document_with_more_of_them_is_dropped() -> None:
    text = "a@b.org " * 5 + "8.8.8.8"
    document = Document(text, {})
    assert Filter(max_matches=5).apply(document) == ("number of matches above 5", 6)
    assert (document.text, document.metrics) == (text, {})
    assert Filter(max_matches=6).apply(document) is None


@given(st.text("0189. ", max_size=60))
def test_every_public_ipv4_address_among_digits_and_dots(text: str) -> None:
    """Space and repeated dots divide; a piece is an address as a whole, or stays."""

    def tag(piece: re.Match[str]) -> str:
        try:
            return "I" if ip_address(piece[0]).is_global else piece[0]
        except ValueError:
            return piece[0]

    assert replaced(text) == re.sub(r"[0-9]+(\.[0-9]+)*", tag, text)


@given(st.text("ab@.:-_'12f( ", max_size=80))
def test_the_rest_of_a_text_stays(text: str) -> None:
    gaps = re.split("[EIP]", replaced(text))
    assert re.fullmatch(".*".join(map(re.escape, gaps)), text)


@pytest.mark.parametrize(
    "text",
    [
        *("a" * 200_000 + "@", "a@" * 100_000, "a." * 100_000 + "@b", "a@" + "b." * 100_000),
        *("1." * 100_000, "2001:" * 40_000, "2001:" + "a" * 200_000, "212-" * 50_000),
        ("a" * 64 + "@" + "b-" * 68) * 1000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    start = time.process_time()
    assert replaced(text) == text
    assert time.process_time() - start < 5  # a quadratic search takes minutes


@pytest.mark.extra("oracles", "datatrove")
@pytest.mark.parametrize(
    "text",
    [
        "Write to jane.doe@example.com or sales-team@mail.example.co.uk, from 8.8.8.8.",
        "Servers 1.1.1.1, 9.9.9.9 and 192.168.1.1; contact: <root@host.org>",
        "No personal data: 3.14, 10.5 km, v1.2.3, @handle, 127.0.0.1",
        "two on a line: a@b.com c@d.com\nand 208.67.222.222\n",
    ],
)
def test_datatrove_finds_the_same(text: str) -> None:
    from datatrove.pipeline.formatters import PIIFormatter

    oracle: Any = PIIFormatter(email_replacement=("E",), ip_replacement=("I",))
    assert replaced(text) == oracle.format(text)
