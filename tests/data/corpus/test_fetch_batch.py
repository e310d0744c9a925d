"""A plan pins the files behind addresses, and a job downloads those of its batch."""

import json
from pathlib import Path

import pytest

from tests.support.web_server import Server
from tests.support.web_sites import serving
from tokamake.config.data import PlanSettings
from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.corpus.corpora import Corpus, refuse_addresses
from tokamake.data.corpus.fetch_batch import fetch_batch
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import Plan, read_plan, write_plan
from tokamake.errors import TemporaryError, UserError

SETTINGS = PlanSettings(shard_bytes=4000, merged_bytes=10**6, max_jobs=2)
ADDRESS = "hf://datasets/org/texts/data"
FILES = {
    "data/0.jsonl": b'{"text": "zero"}\n' * 100,
    "data/1.jsonl": b'{"text": "one"}\n' * 600,  # two shards and more
    "data/10.jsonl.gz": b"packed" * 100,
    "data/2.jsonl": b'{"text": "two"}\n' * 100,
}


@pytest.fixture
def hub(server: Server) -> Server:
    server.repositories["datasets/org/texts"] = dict(FILES)
    server.files["/more.jsonl"] = b'{"text": "more"}\n' * 10
    return server


def plan_of(server: Server, previous: Plan | None = None) -> Plan:
    corpus = Corpus(corpus="web", files=f"{ADDRESS} {server.url}/more.jsonl", weight=1)
    return make_plan([corpus], SETTINGS, declared={}, previous=previous)


def test_files_are_planned_by_their_sizes_without_a_download(hub: Server) -> None:
    plan = plan_of(hub)
    assert all("/api/" in request for request in hub.downloads())
    names = [Path(download.path).name for download in plan.downloads]
    assert names == ["0.jsonl", "1.jsonl", "10.jsonl.gz", "2.jsonl", "more.jsonl"]
    planned = [[Path(path).name for path in shard.files] for shard in plan.shards]
    assert planned == [
        ["more.jsonl", "0.jsonl"], ["1.jsonl"], ["1.jsonl"], ["1.jsonl"], ["2.jsonl", "10.jsonl.gz"]
    ]  # fmt: skip
    assert [shard.byte_range for shard in plan.shards][1:4] == ["0:3200", "3200:6400", "6400:"]


def test_later_files_and_downloads_do_not_change_the_plan(hub: Server, tmp_path: Path) -> None:
    plan = plan_of(hub)
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan
    hub.repositories["datasets/org/texts"]["data/9.jsonl"] = b"{}\n"
    before = len(hub.requests)
    assert plan_of(hub, plan) == plan
    assert len(hub.requests) == before  # a plan needs no network again


def test_a_batch_downloads_its_own_files_once(hub: Server, tmp_path: Path) -> None:
    plan = plan_of(hub)
    write_plan(tmp_path / "plan.json", plan)
    for batch in plan.tokenize_batches:
        output = tmp_path / f"{batch.name}.json"
        fetch_batch(plan=tmp_path / "plan.json", batch=batch.name, output=output)
        listed = json.loads(output.read_text())["files"]
        shards = [shard for shard in plan.shards if shard.name in batch.members]
        assert {entry["path"] for entry in listed} == {path for s in shards for path in s.files}
    contents = {
        **{download.url.rpartition("data/")[2]: download.path for download in plan.downloads}
    }
    for name, content in FILES.items():
        assert Path(contents[name.removeprefix("data/")]).read_bytes() == content
    gets = [r for r in hub.downloads() if "/api/" not in r]
    assert len(gets) == len(set(gets)) == 5
    assert plan_of(hub, plan) == plan


def test_all_files_that_cannot_be_downloaded_are_named(hub: Server, tmp_path: Path) -> None:
    plan = plan_of(hub)
    write_plan(tmp_path / "plan.json", plan)
    commit = hub.commit("datasets/org/texts")
    del hub.repositories["datasets/org/texts"]
    first = plan.tokenize_batches[0].name
    with pytest.raises(UserError) as caught:
        fetch_batch(plan=tmp_path / "plan.json", batch=first, output=tmp_path / "out.json")
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        f"hf://datasets/org/texts@{commit}/data/{number}.jsonl" for number in (0, 1)
    ]
    assert not (tmp_path / "out.json").exists()


def test_a_wrong_address_names_the_row(hub: Server) -> None:
    corpus = Corpus(corpus="web", files="hf://datasets/org/none/x", weight=1)
    with pytest.raises(UserError, match=r'^corpus "web": files: hf://datasets/org/none/x: no such'):
        make_plan([corpus], SETTINGS, declared={})
    indexed = Corpus(corpus="web", files=ADDRESS, format="indexed", weight=1)
    with pytest.raises(UserError, match="an address, but indexed datasets are read from disk"):
        make_plan([indexed], SETTINGS, declared={})


@pytest.mark.extra("corpora", "fastwarc")
@pytest.mark.usefixtures("server")
def test_a_list_of_urls_is_planned_once_and_becomes_warc_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = Corpus(corpus="owt", files="urls:urls.txt", weight=1)
    settings = FetchUrlsSettings(
        urls_per_shard=2, host_seconds=0, allow_private_addresses=True, attempts=1
    )
    with serving() as site:
        Path("urls.txt").write_text(
            "\n".join(f"{site.url}/{name}" for name in ("a", "missing", "b"))
        )
        plan = make_plan([corpus], SETTINGS, declared={}, fetch_urls=settings)
        assert not site.requests
        assert "urls.txt: 3 lines, 3 URLs; left out: none" in capsys.readouterr().err
        assert (
            make_plan([corpus], SETTINGS, declared={}, previous=plan, fetch_urls=settings) == plan
        )
        assert capsys.readouterr().err == ""
        write_plan(tmp_path / "plan.json", plan)
        fetched = []
        for batch in plan.tokenize_batches:
            output = tmp_path / f"{batch.name}.json"
            fetch_batch(
                plan=tmp_path / "plan.json",
                batch=batch.name,
                output=output,
                urls=settings.model_dump_json(),
            )
            fetched += json.loads(output.read_text())["files"]
    assert [entry["outcomes"] for entry in fetched] == [
        {"fetched": 1, "status 404": 1},
        {"fetched": 1},
    ]
    assert all(Path(entry["path"]).stat().st_size == entry["bytes"] for entry in fetched)
    # Another blacklist leaves other URLs out.
    Path("blacklist.txt").write_text("example.org\n")
    other = settings.model_copy(update={"blacklist": Path("blacklist.txt")})
    make_plan([corpus], SETTINGS, declared={}, previous=plan, fetch_urls=other)
    assert "3 lines" in capsys.readouterr().err


@pytest.mark.extra("corpora", "fastwarc")
@pytest.mark.usefixtures("server")
def test_a_list_may_lack_pages_but_not_a_corpus(tmp_path: Path) -> None:
    corpus = Corpus(corpus="owt", files="urls:again.txt urls:urls.txt", weight=1)
    settings = FetchUrlsSettings(host_seconds=0, allow_private_addresses=True, attempts=1)
    plan, output = tmp_path / "plan.json", tmp_path / "out.json"

    def fetch() -> list[dict[str, int]]:
        urls = settings.model_dump_json()
        fetch_batch(plan=plan, batch=batch, output=output, urls=urls)
        return [entry["outcomes"] for entry in json.loads(output.read_text())["files"]]

    with serving() as site:
        Path("again.txt").write_text(f"{site.url}/busy")
        Path("urls.txt").write_text(f"{site.url}/a")
        one_job = SETTINGS.model_copy(update={"max_jobs": 1})
        made = make_plan([corpus], one_job, declared={}, fetch_urls=settings)
        write_plan(plan, made)
        (batch,) = (each.name for each in made.tokenize_batches)
        site.refusals = {name: [(503, "0")] * 100 for name in ("/busy", "/a")}
        with pytest.raises(TemporaryError, match="no page of 1 URL could be fetched: 1 status 503"):
            fetch()
        assert not output.exists()
        assert not [*tmp_path.rglob("*.warc.gz")]
        del site.refusals["/a"]
        assert fetch() == [{"status 503": 1}, {"fetched": 1}]


@pytest.mark.extra("corpora", "fastwarc")
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("reverse", [False, True])
def test_pages_of_a_later_job_count_for_a_list_without_pages(tmp_path: Path, reverse: bool) -> None:
    """The result of a corpus does not depend on the order of its jobs."""
    corpus = Corpus(corpus="owt", files="urls:urls.txt", weight=1)
    settings = FetchUrlsSettings(
        urls_per_shard=1, host_seconds=0, allow_private_addresses=True, attempts=1
    )
    plan, found = tmp_path / "plan.json", {}
    with serving() as site:
        names = ["busy-1", "busy-2", "a", "busy-3"]
        Path("urls.txt").write_text("\n".join(f"{site.url}/{name}" for name in names))
        one_shard_a_job = SETTINGS.model_copy(update={"shard_bytes": 1, "max_jobs": 9})
        made = make_plan([corpus], one_shard_a_job, declared={}, fetch_urls=settings)
        write_plan(plan, made)
        batches = [each.name for each in made.tokenize_batches]
        assert len(batches) == 4
        site.refusals = {f"/{name}": [(503, "0")] * 100 for name in names if name != "a"}
        for batch in reversed(batches) if reverse else batches:
            output = tmp_path / f"{batch}.json"
            fetch_batch(plan=plan, batch=batch, output=output, urls=settings.model_dump_json())
            (entry,) = json.loads(output.read_text())["files"]
            found[batch] = entry["outcomes"]
        assert site.paths().count("/a") == 1
        outcomes = [found[batch] for batch in batches]
        assert outcomes == [{"status 503": 1}, {"status 503": 1}, {"fetched": 1}, {"status 503": 1}]


@pytest.mark.usefixtures("server")
def test_a_list_of_urls_is_for_the_workflow() -> None:
    corpus = Corpus(corpus="owt", files="urls:none.txt", weight=1)
    with pytest.raises(UserError, match=r'^corpus "owt": files: urls:none.txt: cannot be read'):
        make_plan([corpus], SETTINGS, declared={})
    with pytest.raises(UserError, match="a list of URLs, which only the workflow fetches"):
        refuse_addresses(corpus)
