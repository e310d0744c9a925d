"""Stage `fetch-batch`: download the raw files of a job batch that are behind addresses."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.config_files import parse_json
from tokamake.data.corpus.plan_file import Plan, batch_shards, read_plan
from tokamake.data.urls.url_list import is_url_list
from tokamake.errors import UserError
from tokamake.files import write_json
from tokamake.remote.addresses import RemoteFile
from tokamake.remote.download import download
from tokamake.runtime.console import counted
from tokamake.units import in_bytes

ALL = "all"
"""In place of a batch: the files that the tokenizer is trained on."""


def fetch_batch(
    *, plan: Path, batch: str, output: Path, workers: int = 4, urls: str = "{}"
) -> None:
    """Download the raw files of a `tokenize` batch that the table of corpora names by addresses.

    The plan pins each file: its commit on the Hugging Face Hub, or its size and version on a web
    server. Downloads go to the cache (HF_HOME), where existing files are used again; the
    workspace gets links. An interrupted download continues. The pages of a list of URLs become
    WARC files, with the outcome of each URL beside them.

    Args:
        plan: plan.json of the workflow.
        batch: name of a batch of shards in the plan; all: the files that the tokenizer is trained
            on.
        output: JSON file that names the files, written when all are there.
        workers: downloads at the same time.
        urls: the config's `fetch_urls` section as JSON.
    """
    settings = parse_json(FetchUrlsSettings, urls, where="--urls")
    read = read_plan(plan)
    members = read.tokenizer if batch == ALL else batch_shards(plan, batch)
    paths = {path for member in members for path in member.files}
    # Two addresses may stand for one file.
    downloads = {entry.path: entry.file for entry in read.downloads}
    files = [file for path, file in downloads.items() if path in paths]
    lists = [file for file in files if is_url_list(file.url)]
    _download([file for file in files if not is_url_list(file.url)], workers)
    outcomes = _fetch_urls(lists, settings, plan=read) if lists else {}
    listed = [
        {"path": file.path, "url": file.url, "bytes": Path(file.path).stat().st_size}
        | ({"outcomes": dict(outcomes[file.path])} if file.path in outcomes else {})
        for file in files
    ]
    write_json(output, {"batch": batch, "files": listed})
    size = sum(Path(file.path).stat().st_size for file in files)
    print(f"{output}: {counted(len(files), 'file')}, {in_bytes(size)}")


def _download(files: list[RemoteFile], workers: int) -> None:
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        errors = [future.exception() for future in [pool.submit(download, f) for f in files]]
    for error in errors:
        if error and not isinstance(error, UserError):
            raise error
    if reasons := [str(error) for error in errors if error]:
        raise UserError("\n".join(reasons))


def _fetch_urls(
    files: list[RemoteFile], settings: FetchUrlsSettings, *, plan: Plan
) -> dict[str, Counter[str]]:
    """Fetch WARC files one after the other, with one pace for each host; return their outcomes.

    A file may lack pages, but not a whole corpus. So a file without a page waits for one with pages
    in its corpus. Files of other batches count, too: they are fetched here, and their jobs find
    them in the cache. The result does not depend on the order of the jobs.
    """
    from tokamake.data.urls.cleaning import read_blacklist
    from tokamake.data.urls.fetch_shard import NoPageError, Outcomes, fetch_listed
    from tokamake.data.urls.hosts import Crawler
    from tokamake.data.urls.journal import FETCHED

    blacklist = read_blacklist(settings.blacklist, with_default=settings.default_blacklist)
    crawler = Crawler(settings, blacklist)
    of_corpora = _url_lists(plan)
    fetched: dict[str, Outcomes] = {}

    def fetch(file: RemoteFile) -> None:
        of_corpus = [*map(Path, of_corpora[file.path])]
        outcomes = fetch_listed(file, settings, crawler=crawler, of_corpus=of_corpus)
        fetched[file.path] = outcomes
        print(f"{file.path}: {outcomes.summary}", flush=True)

    for file in files:
        with suppress(NoPageError):
            fetch(file)
    planned = {entry.path: entry.file for entry in plan.downloads}
    for file in [file for file in files if file.path not in fetched]:
        corpus = of_corpora[file.path]
        others = (path for path in corpus if path not in fetched and planned[path] not in files)
        while not any(path in fetched and fetched[path].counts[FETCHED] for path in corpus):
            if (path := next(others, None)) is None:
                break
            with suppress(NoPageError):
                fetch(planned[path])
        fetch(file)
    return {path: outcomes.counts for path, outcomes in fetched.items()}


def _url_lists(plan: Plan) -> dict[str, list[str]]:
    """WARC files of URL lists: path → paths of all of them that its corpus reads."""
    listed = {entry.path for entry in plan.downloads if is_url_list(entry.url)}
    corpora: dict[str, dict[str, None]] = {}
    members = [(each.corpus, each.files) for each in plan.tokenizer]
    members += [(each.corpus, each.files) for each in plan.shards]
    for corpus, paths in members:
        corpora.setdefault(corpus, {}).update(dict.fromkeys(listed.intersection(paths)))
    return {path: sorted(paths) for paths in corpora.values() for path in paths}
