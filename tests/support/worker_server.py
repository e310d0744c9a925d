"""Workers of pytest-xdist in forks of a server that has collected the tests.

The server imports the test modules and rewrites their asserts once. In a worker, collection finds
them in `sys.modules`: else each worker would spend 20 seconds on that.
"""

import gc
import json
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import Server, end_after
from tests.support.tokamake_server import run_python, set_num_threads

ARGUMENTS = "collected.json"
"""File beside the socket: the files and folders that pytest was asked for."""


def _main() -> None:
    path = Path(sys.argv[1])
    asked = json.loads(path.with_name(ARGUMENTS).read_text())
    pytest.main(["--collect-only", "-qq", "--show-capture=no", "-p", "no:cacheprovider", *asked])
    gc.collect()
    gc.freeze()
    if request := Server(path).serve():
        set_num_threads()
        end_after(lambda: run_python(request.arguments))


if __name__ == "__main__":
    _main()
