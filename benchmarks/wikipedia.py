"""Compare the reader of Wikipedia's dumps with WikiExtractor: from a dump to jsonl.

    python -m venv extractor && extractor/bin/pip install wikiextractor
    python benchmarks/wikipedia.py --extractor extractor/bin/python --articles 20000 --rounds 5

The dump is made of sentences with links, references, templates, tables and lists; the same number
of articles gives the same bytes. Both write a jsonl file with title and text, in turns. The column
"times" is the median of the rounds' ratios of CPU seconds. tokamake uses one process; WikiExtractor
uses one to extract, and others to read and write.
"""

import argparse
import bz2
import random
import shutil
import sys
from pathlib import Path
from statistics import median

import measure

_TEXT = """
    the of and in a was to is for on as by with at from that his it were an are which this also
    river city century population history national first north company family village species
    music station government school football university building district railway international
"""
_WORDS = _TEXT.split()
_READ = """
import sys, orjson
from pathlib import Path
from tokamake.data.readers import open_input
with open(sys.argv[2], "wb") as out:
    for block in open_input(Path(sys.argv[1])).blocks(("title", "text")):
        out.writelines(orjson.dumps(record) + b"\\n" for record in block.records)
"""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extractor", type=Path, required=True, help="Python with wikiextractor")
    parser.add_argument("--articles", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    print("| dump | XML MB | contestant | articles | s | CPU s | articles/CPU s | times |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for sentences in (5, 60):
        for suffix in (".xml.bz2", ".xml"):
            dump = options.work / f"{sentences}-sentences{suffix}"
            num_articles = options.articles * 5 // sentences
            size = write_dump(dump, num_articles, sentences=sentences)
            costs = compare(dump, options.work, extractor=options.extractor, rounds=options.rounds)
            theirs, _ = costs["WikiExtractor"]
            for name, (each, written) in costs.items():
                wall, cpu = (median(cost[field] for cost in each) for field in (0, 1))
                pairs = zip(theirs, each, strict=True)
                times = median(other.cpu_seconds / own.cpu_seconds for other, own in pairs)
                print(
                    f"| {dump.name} | {size / 1e6:.1f} | {name} | {written:,} | {wall:.2f} | "
                    f"{cpu:.2f} | {num_articles / cpu:,.0f} | {times:.1f} |",
                    flush=True,
                )


def compare(
    dump: Path, work: Path, *, extractor: Path, rounds: int
) -> dict[str, tuple[list[measure.Cost], int]]:
    """Run both in turns; return the costs of each round, and the articles that each wrote."""
    output = work / "extracted"
    commands = {
        "WikiExtractor": [
            *(str(extractor), "-m", "wikiextractor.WikiExtractor", str(dump), "--json"),
            *("--no-templates", "--processes", "1", "--bytes", "100G", "-o", str(output)),
        ],
        "tokamake": [sys.executable, "-c", _READ, str(dump), str(output / "articles.jsonl")],
    }
    costs: dict[str, list[measure.Cost]] = {name: [] for name in commands}
    written = {}
    for _ in range(rounds):
        for name, command in commands.items():
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir()
            cost = measure.run(command, log=work / "log", environment={})
            if cost.status:
                raise SystemExit((work / "log").read_text())
            costs[name].append(cost)
            files = (path for path in output.rglob("*") if path.is_file())
            written[name] = sum(path.read_bytes().count(b"\n") for path in files)
    return {name: (costs[name], written[name]) for name in commands}


def write_dump(path: Path, num_articles: int, *, sentences: int) -> int:
    """Write a dump; return the bytes of its XML. A bz2 one has a stream for each hundred pages."""
    rng = random.Random(1)
    pack = bz2.compress if path.suffix == ".bz2" else bytes
    size = 0
    with path.open("wb") as target:
        # WikiExtractor expects each tag in a line of its own, and a namespace of templates.
        header = (
            "<mediawiki>\n<siteinfo>\n<base>https://a.org/wiki/M</base>\n"
            '<namespace key="10">Template</namespace>\n</siteinfo>\n'
        )
        target.write(pack(header.encode()))
        for first in range(0, num_articles, 100):
            count = min(100, num_articles - first)
            pages = "".join(_page(rng, first + n + 1, sentences) for n in range(count)).encode()
            size += len(pages)
            target.write(pack(pages))
        target.write(pack(b"</mediawiki>\n"))
    return size


def _page(rng: random.Random, number: int, sentences: int) -> str:
    text = _article(rng, sentences).replace("&", "&amp;").replace("<", "&lt;")
    return (
        f"  <page>\n    <title>Article {number}</title>\n    <ns>0</ns>\n    <id>{number}</id>\n"
        f"    <revision>\n      <id>{number}</id>\n"
        "      <timestamp>2024-01-01T00:00:00Z</timestamp>\n"
        "      <contributor>\n        <username>A</username>\n        <id>1</id>\n"
        "      </contributor>\n      <model>wikitext</model>\n      <format>text/x-wiki</format>\n"
        f'      <text xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
    )


def _article(rng: random.Random, sentences: int) -> str:
    parts = [
        "{{Infobox thing\n| name = X\n| area = {{convert|5|km2}}\n| image = A.jpg\n}}\n'''X'''"
    ]
    for number in range(sentences):
        words = rng.choices(_WORDS, k=rng.randrange(8, 25))
        words[3] = f"[[{words[3]} {words[4]}|{words[3]}]]"
        words[6] = f"[[{words[6]}]]" if number % 2 else f"''{words[6]}''"
        sentence = " ".join(words).capitalize() + "."
        if number % 3 == 0:
            sentence += (
                f"<ref>{{{{cite web|url=http://a.org/{number}|title={words[1]} {words[2]}|"
                "date=5 May 2010|publisher=[[A]]}}</ref>"
            )
        parts.append(sentence)
        if number % 20 == 10:
            parts.append('\n{| class="wikitable"\n! a !! b\n|-\n| 1 || [[c]]\n|}\n== Part ==\n')
        elif number % 6 == 5:
            parts.append("\n\n[[File:B.jpg|thumb|A [[caption]] of it]]\n* one [[item]]\n* two\n\n")
    return " ".join(parts) + "\n== References ==\n{{reflist}}\n[[Category:Things]]\n"


if __name__ == "__main__":
    main()
