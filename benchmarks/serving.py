"""Measure how a server answers many clients at the same time.

    python benchmarks/serving.py --models tiny 135M --clients 16 --seconds 60 --work benchmark-work

Starts `tokamake serve` in a process of its own. One client, then all clients, ask for streamed
continuations of prompts of different lengths, each as soon as its last one has ended.
"""

import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from generating import SHAPES, make_model

from tokamake.data.corpus.train_tokenizer import train_tokenizer


@dataclass
class Load:
    """What clients have seen."""

    failures: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds from a request to its first token."""
    between: list[float] = field(default_factory=list)
    """Seconds between tokens of a sequence."""


def main() -> None:
    """Measure each model."""
    options = _options()
    tokenizer = make_tokenizer(options.work / "tokenizer")
    print("model  clients  requests  failed  tokens/s   first p50    p99   between p50    p99 (ms)")
    for name in options.models:
        folder = make_model(options.work / name, name)
        command = [sys.executable, "-m", "tokamake", "serve", str(folder), "--port", "0"]
        command += ["--tokenizer", str(tokenizer), "--batch-size", str(options.clients)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout
            line = next(line for line in process.stdout if line.startswith("serves "))
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            assert found
            port = int(found[1])
            run(port, 1, seconds=5, options=options)  # warms up
            speeds = []
            for clients in (1, options.clients):
                load = run(port, clients, seconds=options.seconds, options=options)
                speeds.append(load.num_tokens / options.seconds)
                print(
                    f"{name:5} {clients:8} {load.num_requests:9} {len(load.failures):7} "
                    f"{speeds[-1]:9.1f} {_ms(load.first, 50):11.1f} {_ms(load.first, 99):6.1f} "
                    f"{_ms(load.between, 50):13.1f} {_ms(load.between, 99):6.1f}",
                    flush=True,
                )
                for failure in load.failures[:3]:
                    print(failure)
            print(
                f"{name:5} {speeds[1] / speeds[0]:.2f} times the tokens of one client", flush=True
            )
        finally:
            process.terminate()
            process.wait()


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of 1,000 tokens, whose ids all models have."""
    text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    raw = folder.with_suffix(".jsonl")
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text("".join(json.dumps({"text": line}) + "\n" for line in text.splitlines() if line))
    train_tokenizer([raw], vocab_size=1000, output=folder)
    return folder


def run(port: int, clients: int, *, seconds: float, options: argparse.Namespace) -> Load:
    """Let clients ask for some time; count tokens that came within it."""
    load, lock = Load(), threading.Lock()
    end = time.perf_counter() + seconds

    def ask_on(number: int) -> None:
        draws = random.Random(number)
        while time.perf_counter() < end:
            tokens = [draws.randrange(1000) for _ in range(draws.randrange(4, 2 * options.prompt))]
            body = {"prompt": tokens, "max_tokens": options.new_tokens, "stream": True}
            try:
                times = _ask(port, {**body, "seed": number})
            except (OSError, http.client.HTTPException, ValueError) as error:
                with lock:
                    load.failures.append(f"{type(error).__name__}: {error}")
                continue
            start, *tokens_at = times
            with lock:
                load.num_requests += 1
                load.num_tokens += sum(at <= end for at in tokens_at)
                load.first.append(tokens_at[0] - start)
                load.between += [b - a for a, b in pairwise(tokens_at)]

    threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return load


def _ask(port: int, body: dict[str, object]) -> list[float]:
    """Times of a request and of the parts of its reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        times = [time.perf_counter()]
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise ValueError(f"status {reply.status}: {reply.read()[:200]!r}")
        is_done = False
        while line := reply.readline():
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise ValueError(line.decode())
                times.append(time.perf_counter())
            is_done |= line.startswith(b"data: [DONE]")
        if not is_done or len(times) == 1:
            raise ValueError("the reply is not complete")
        return times
    finally:
        connection.close()


def _ms(seconds: list[float], percent: int) -> float:
    return 1000 * statistics.quantiles(seconds, n=100)[percent - 1]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--prompt", type=int, default=32, help="mean tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
