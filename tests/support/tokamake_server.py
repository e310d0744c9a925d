"""`tokamake`, and Python with torch and tokamake, in forks of a server that has imported them."""

import gc
import importlib
import os
import pkgutil
import runpy
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import tokamake
from tests.support.fork_server import Server, end_after


def _main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # as commands with a model set it
    os.environ["OMP_NUM_THREADS"] = "1"
    import_all()
    for finalizer in weakref.finalize._registry:  # torch's take longer than the rest of a fork
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    if request := Server(Path(sys.argv[1])).serve():
        set_num_threads()
        run = run_tokamake if request.program == "tokamake" else run_python
        end_after(lambda: run(request.arguments))


def import_all() -> None:
    """Import tokamake and what it imports when it runs; ranks would take a second for that."""
    import bokeh.plotting  # noqa: F401
    import cyclopts  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.utils.tensorboard

    from tokamake.train.checkpoints import summary

    for module in pkgutil.walk_packages(tokamake.__path__, "tokamake."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # of a package that is not installed
                importlib.import_module(module.name)
    summary.environment({})  # it remembers the versions of all packages
    if not torch.cuda.is_available():  # else DeepSpeed must choose the device of each process
        with patch.dict(os.environ, DS_ACCELERATOR="cpu"):
            import deepspeed  # noqa: F401


def set_num_threads() -> None:
    """As torch does when it is imported, which the server did."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def run_tokamake(arguments: list[str]) -> None:
    from tokamake import cli

    program = Path(sys.prefix, "bin/tokamake")
    sys.argv = [str(program), *arguments]
    sys.path[0] = str(program.parent)
    sys.exit(cli.main())


def run_python(arguments: list[str]) -> None:
    """Run what Python would: `-c PROGRAM`, `-m MODULE` or a file, after options."""
    options = [argument.startswith("-") and argument not in ("-c", "-m") for argument in arguments]
    first, *rest = arguments[options.index(False) :]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _main()
