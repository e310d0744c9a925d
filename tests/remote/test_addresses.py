"""Addresses of the Hub name a repository, a revision, a path, a configuration and a split."""

from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.remote.addresses import HubAddress, parse_address

PARSED = {
    "hf://datasets/org/name": HubAddress("dataset", "org/name", "main", ""),
    "hf://org/name-1.5_b": HubAddress("model", "org/name-1.5_b", "main", ""),
    "hf://datasets/org/name@v1/en/*.parquet": HubAddress(
        "dataset", "org/name", "v1", "en/*.parquet"
    ),
    "hf://datasets/o/n@refs%2Fconvert%2Fparquet": HubAddress(
        "dataset", "o/n", "refs/convert/parquet", ""
    ),
    "hf://datasets/o/n/a%20b%23c/": HubAddress("dataset", "o/n", "main", "a b#c"),
    "hf://datasets/o/n?config=en&split=test": HubAddress(
        "dataset", "o/n", "main", "", "en", "test"
    ),
}


@pytest.mark.parametrize("address", PARSED)
def test_an_address_has_these_parts(address: str) -> None:
    assert parse_address(address) == PARSED[address]


@pytest.mark.parametrize(
    "address",
    [
        "hf://name",
        "hf://datasets/name",
        "hf://spaces/org/name",
        "hf://datasets/org/name?configuration=en",
        "hf://datasets/org/name/path?config=en",
        "hf://org/name?split=test",
        # These would leave their folder.
        "hf://../..",
        "hf://org/.",
        "hf://datasets/org/..",
        "hf://org/name@..",
        "hf://org/name@a%2F..%2Fb",
        "hf://org/name/../../x",
        "hf://org/name/%2e%2e/x",
        "hf://org/name/a\\b",
        "hf://org/name/a\x00b",
        "hf://org/name@\n",
    ],
)
def test_other_forms_are_refused_with_the_form(address: str) -> None:
    with pytest.raises(UserError, match=r"write hf://datasets/ORG/NAME@REVISION/PATH") as caught:
        parse_address(address)
    assert str(caught.value).startswith((f"{address}: ", f"{address!a}: "))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("path", ["a b/c#d%.jsonl", "x.bin"])
@pytest.mark.parametrize("kind", ["dataset", "model"])
def test_the_address_of_a_file_at_a_commit_is_parsed_again(kind: str, path: str) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    address = HubAddress(kind, "org/name", "main", "").at(commit, path)
    assert parse_address(address) == HubAddress(kind, "org/name", commit, path)


def test_what_is_fetched_has_a_folder_for_each_revision() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = Path("results/raw/hub/models/org/name")
    for revision, name in (("main", "main"), ("a/b", "a%2Fb"), (commit, commit[:12])):
        assert HubAddress("model", "org/name", revision, "x").fetched == folder / name / "x"
