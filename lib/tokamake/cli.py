"""The `tokamake` command: one subcommand a stage, made from its function's signature and docstring.

A new stage is one line in STAGES. Modules are imported only when their subcommand runs.
"""

import ast
import gc
import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

STAGES = {
    "sample-corpus": "tokamake.data.corpus.sample_corpus",
    "train-tokenizer": "tokamake.data.corpus.train_tokenizer",
    "hash-documents": "tokamake.data.corpus.hash_documents",
    "find-duplicates": "tokamake.data.corpus.find_duplicates",
    "tokenize": "tokamake.data.tokenize.tokenize",
    "merge": "tokamake.data.indexed.merge",
    "describe": "tokamake.data.indexed.describe",
    "weigh": "tokamake.data.mixture.weigh",
    "index": "tokamake.data.samples.index",
    "init-model": "tokamake.checkpoint.init_model",
    "convert": "tokamake.checkpoint.convert",
    "resolve": "tokamake.train.resolve",
    "plan-segments": "tokamake.train.plan_segments",
    "doctor": "tokamake.doctor.doctor",
    "train": "tokamake.train.train",
    "evaluate": "tokamake.evaluate.evaluate",
    "generate": "tokamake.generate.generate",
    "plot": "tokamake.report.plot",
    "compare": "tokamake.report.compare",
}
"""Subcommand to module, in the order of the data's way; the function has the subcommand's name."""

TOOLS = {
    "plan": "tokamake.data.corpus.plan",
    "trace": "tokamake.data.indexed.trace",
    "trace-sample": "tokamake.data.samples.trace_sample",
    "trace-steps": "tokamake.data.samples.trace_steps",
    "split": "tokamake.data.corpus.split",
    "repair": "tokamake.data.indexed.repair",
    "lint-weights": "tokamake.data.mixture.lint_weights",
    "mix": "tokamake.data.mixture.mix",
    "inspect": "tokamake.checkpoint.inspect",
    "status": "tokamake.status.status",
    "benchmark-train": "tokamake.train.benchmark_train",
    "find-learning-rate": "tokamake.train.find_learning_rate",
}
"""Subcommands that no rule calls, in the same form."""

EXIT_USER_ERROR = 2


def main() -> None:
    """Run one subcommand; a user's mistake is one line on stderr and exit status 2."""
    arguments = sys.argv[1:]
    if arguments and re.fullmatch(r"--local[_-]rank=\d+", arguments[0]):
        del arguments[0]  # from launchers such as deepspeed; LOCAL_RANK says it, too
    stage = arguments[0] if arguments and arguments[0] in STAGES | TOOLS else ""
    # A batch system ends jobs so; as an exception it lets half-written files be removed.
    from tokamake.runtime.rank_errors import STOPPED

    if stage == "train":  # it is asked to stop alike by a person
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
        signal.signal(signal.SIGINT, lambda *_: sys.exit(STOPPED))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _run(stage, arguments)
    except KeyboardInterrupt:
        _fail(stage, "stopped; the same command goes on", 130)


def _run(stage: str, arguments: list[str]) -> None:
    gc.disable()  # What is imported stays: to look for garbage in it is a tenth of the start.
    from cyclopts import App, CycloptsError, Parameter

    from tokamake.errors import UserError, of_system

    app = App(
        name="tokamake",
        help="Turn raw text into a trained language model, stage by stage.",
        help_on_error=False,
        suppress_keyboard_interrupt=False,
        default_parameter=Parameter(negative_iterable=()),
    )
    commands = STAGES | TOOLS
    for name in [stage] if stage else commands:
        # With a summary given, the general help needs no import.
        app.command(
            f"{commands[name]}:{function_name(name)}",
            name=name,
            help=None if stage else summary(name),
        )
    try:
        run, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False)
        gc.freeze()
        gc.enable()
        run(*bound.args, **bound.kwargs)
    except CycloptsError as error:
        command = f"tokamake {stage}".strip()
        _fail(stage, f"{_one_line(str(error))} See `{command} --help`.", EXIT_USER_ERROR)
    except UserError as error:
        if not error.among_ranks:
            _fail(stage, str(error), EXIT_USER_ERROR)
        from tokamake.runtime.rank_errors import exit_now

        _say(stage, str(error))
        exit_now(EXIT_USER_ERROR)
    except BrokenPipeError:  # whoever read our output has enough
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        _fail(stage, f"{of_system(error)}; mend it and run again", 1)


def function_name(stage: str) -> str:
    """Name of a stage's function and rule: its subcommand with underscores."""
    return stage.replace("-", "_")


def summary(stage: str) -> str:
    """First line of a stage function's docstring, read from the source without importing it."""
    source = _source_file((STAGES | TOOLS)[stage])
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function_name(stage):
            return (ast.get_docstring(node) or "").partition("\n")[0]
    raise AssertionError(f"{source} defines no {function_name(stage)}")


def _source_file(module: str) -> Path:
    """Source of a module of this package; `find_spec` of it would import the packages above it."""
    package = find_spec("tokamake")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fail(stage: str, message: str, status: int) -> None:
    _say(stage, message)
    os._exit(status) if status == 130 else sys.exit(status)


def _say(stage: str, message: str) -> None:
    sys.stdout.flush()
    command = f"tokamake {stage}".strip()
    for line in message.splitlines():
        print(f"{command}: {line}", file=sys.stderr)
    sys.stderr.flush()
