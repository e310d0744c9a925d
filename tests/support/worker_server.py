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


class _Failures:
    """Forgets modules that cannot be imported: workers would take them for modules without tests.

    pytest leaves such a module, half made, in `sys.modules`.
    """

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            path = str(Path(report.nodeid.partition("::")[0]).absolute())
            for name, module in [*sys.modules.items()]:
                if getattr(module, "__file__", None) == path:
                    del sys.modules[name]


def _main() -> None:
    path = Path(sys.argv[1])
    asked = json.loads(path.with_name(ARGUMENTS).read_text())
    options = ["--collect-only", "-qq", "--show-capture=no", "-p", "no:cacheprovider"]
    pytest.main([*options, *asked], plugins=[_Failures()])
    gc.freeze()
    if request := Server(path).serve():
        set_num_threads()
        end_after(lambda: run_python(request.arguments))


if __name__ == "__main__":
    _main()
