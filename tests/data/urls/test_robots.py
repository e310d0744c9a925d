"""robots.txt as RFC 9309 has it."""

import time

import pytest

from tokamake.data.urls.robots import Robots, parse_robots

TEXT = """
User-agent: foobot
User-agent: BarBot # two agents
Disallow: /a
Allow: /a/b
Disallow: /*.gif$
Disallow: /*/print?
Crawl-delay: 2.5

User-agent: *
Disallow: /

User-agent: foobot
Disallow: /second
"""


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("", True),
        ("/a", False),
        ("/abc", False),
        ("/a/b/c", True),
        ("/x.gif", False),
        ("/x.gif?a", True),
        ("/x/print?y", False),
        ("/x/print", True),
        ("/second", False),
        ("/%61", False),
    ],
)
def test_the_longest_rule_of_all_groups_of_an_agent_decides(path: str, is_allowed: bool) -> None:
    robots = parse_robots(TEXT, "FooBot/2.1 (+https://example.org)")
    assert robots.allows(f"http://example.org{path}") == is_allowed
    assert robots.delay == 2.5


def test_other_agents_have_the_rules_of_the_star() -> None:
    assert not parse_robots(TEXT, "other/1").allows("http://example.org/")
    assert parse_robots("Disallow: /\n", "other/1") == Robots()
    assert parse_robots("User-agent: *\nDisallow:\n", "other/1").allows("http://example.org/x")


def test_of_equal_rules_one_that_allows_decides() -> None:
    robots = parse_robots("User-agent: *\nDisallow: /a\nAllow: /a\n", "other")
    assert robots.allows("http://example.org/a")


def test_many_wildcards_take_no_time() -> None:
    robots = parse_robots(f"User-agent: *\nDisallow: /{'*a' * 500}$\n", "other")
    start = time.monotonic()
    assert robots.allows(f"http://example.org/{'a' * 2000}b")
    assert time.monotonic() - start < 1
