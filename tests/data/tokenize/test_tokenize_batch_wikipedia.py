"""A dump of Wikipedia gives the same tokens for any size of shards and any number of workers."""

import bz2
import json
from pathlib import Path

import pytest

from tests.support.wikipedia_dumps import multistream, pages_of, xml
from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import Plan, write_plan
from tokamake.data.corpus.plan_shards import is_divisible
from tokamake.data.corpus.raw_files import RawFile
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.trace import origin, trace
from tokamake.data.tokenize.tokenize_batch import tokenize_batch
from tokamake.data.tokenize.verify import verify

NUM_ARTICLES = 120
PAGES = pages_of(NUM_ARTICLES)
DUMPS = {
    "wiki-pages-articles-multistream.xml.bz2": multistream(PAGES, pages_a_stream=10),
    "wiki-pages-articles.xml.bz2": bz2.compress(xml(PAGES)),
    "wiki-pages-articles.xml": xml(PAGES),
}


def planned(workspace: Path, name: str, *, shard_bytes: int) -> Plan:
    (workspace / name).write_bytes(DUMPS[name])
    corpus = Corpus(corpus="wiki", files=str(workspace / name), weight=1)
    settings = PlanSettings(shard_bytes=shard_bytes, max_jobs=1)
    plan = make_plan([corpus], settings, declared={})
    write_plan(workspace / "plan.json", plan)
    return plan


def tokens_of(workspace: Path, plan: Plan, *, workers: int = 1) -> tuple[bytes, list[str]]:
    """Tokenize the plan; return all tokens, and the page of each document."""
    tokenize_batch(
        output=workspace / "shards",
        tokenizer=workspace / "tokenizer",
        plan=workspace / "plan.json",
        batch="wiki-00000",
        summary=workspace / "summary.json",
        empty_documents="keep",
        workers=workers,
    )
    tokens, origins = b"", []
    for shard in plan.shards:
        prefix = workspace / "shards" / shard.name
        tokens += prefix.with_suffix(".bin").read_bytes()
        num_documents = len(IndexedDataset(prefix).document_bounds) - 1
        origins += [origin(prefix, number) for number in range(num_documents)]
    return tokens, origins


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (2, 2), (3, 3), (7, 7), (50, 2)])
def test_shards_of_each_size_have_the_same_tokens(
    workspace: Path, count: int, workers: int
) -> None:
    found = []
    for name, content in DUMPS.items():
        plan = planned(workspace, name, shard_bytes=-(-len(content) // count))
        is_single = name == "wiki-pages-articles.xml.bz2"
        assert len(plan.shards) == (1 if is_single else count)
        tokens, origins = tokens_of(workspace, plan, workers=workers)
        expected = [f"{workspace / name}: page {3 * n + 10}" for n in range(NUM_ARTICLES)]
        assert origins == expected
        found.append(tokens)
        inputs = [read_manifest(workspace / "shards" / s.name)["inputs"][0] for s in plan.shards]
        assert sum(raw["bytes"] for raw in inputs) == len(content)
        assert sum(raw.get("skipped", {}).get("redirects", 0) for raw in inputs) == NUM_ARTICLES
        verify([workspace / "shards" / shard.name for shard in plan.shards])
    whole = planned(workspace, "wiki-pages-articles.xml", shard_bytes=10**9)
    assert {*found} == {tokens_of(workspace, whole)[0]}


@pytest.mark.parametrize("name", DUMPS)
def test_trace_prints_the_text_of_a_page(
    workspace: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    plan = planned(workspace, name, shard_bytes=len(DUMPS[name]) // 3)
    tokens_of(workspace, plan)
    prefix = workspace / "shards" / plan.shards[-1].name
    number = len(IndexedDataset(prefix).document_bounds) - 2
    capsys.readouterr()
    trace(prefix, number)
    where, text = capsys.readouterr().out.splitlines()[:2]
    assert where.endswith(f"{workspace / name}: page {3 * NUM_ARTICLES + 7}")
    assert json.loads(text)["text"].startswith(f"Article {NUM_ARTICLES - 1} has words.")


@pytest.mark.parametrize(
    ("path", "divides"),
    [
        ("enwiki-20260101-pages-articles-multistream.xml.bz2", True),
        ("enwiki-20260101-pages-articles-multistream12.xml-p5p90.bz2", True),
        ("enwiki-20260101-pages-articles-multistream-index.txt.bz2", False),
        ("enwiki-20260101-pages-articles.xml.bz2", False),
    ],
)
def test_names_of_dumps_at_an_address_tell_whether_plan_divides_them(
    path: str, divides: bool
) -> None:
    assert is_divisible(RawFile(path, 10**9, None, is_remote=True)) == divides
