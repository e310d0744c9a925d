"""The `tokamake` command: one subcommand a stage, made from its function's signature and docstring.

Modules are imported only when their subcommand runs.
"""

import gc
import inspect
import os
import re
import shlex
import signal
import sys
from contextlib import nullcontext, redirect_stdout
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tokamake.commands import (
    COMMANDS,
    GROUPS,
    ONLY_RULES,
    TASK_FOLDERS,
    function_name,
    group_of,
    module_name,
    summary,
    title,
)
from tokamake.errors import EXIT_USER_ERROR, SignalExit

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError


_HELP_ALL = "--help-all"
_MORE_MEMORY = "give it more memory, or fewer workers or smaller micro batches, and rerun"

SEVERAL_FILES = {
    *("sample-corpus", "train-tokenizer", "split", "tokenize", "merge", "repair", "index"),
    *("tokenize-batch", "merge-batch", "extend-tokenizer"),
    *("init-model", "convert"),
}
"""Subcommands whose output is a folder or a prefix, which no device or pipe can be."""

ONLINE = {"fetch", "fetch-batch", "fetch-task", "plan", "push", "train"}
"""Subcommands that may use the Hugging Face Hub; `train` is here for its trackers. In all other
subcommands, HF_HUB_OFFLINE is set: libraries would ask for files that they have, and compute
nodes have no network."""

_ADDRESS = re.compile(r"([\w.-]+=)?(hf|https?)://")
"""Beginning of an argument, or of an option's value, that is an address."""
_MOST_NAMED = 10
"""Most options that a message names."""
_NEAR = 0.6
"""Least similarity of an unknown option and a suggested one."""

EXTRAS = {
    "serve": ("fastapi", "httptools", "prometheus_client", "starlette", "uvicorn", "uvloop"),
    "train": ("deepspeed", "jinja2", "mpi4py", "tensorboard", "torch"),
    "workflow": ("bokeh", "pandas", "snakemake"),
}
"""Packages that only some subcommands need, by the extra that installs them."""


def main() -> None:
    """Run one subcommand; a user's mistake is one line on stderr and exit status 2."""
    stage = ""
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        arguments = sys.argv[1:]
        _refuse_closed_descriptors(arguments)
        if arguments and re.fullmatch(r"--local[_-]rank=\d+", arguments[0]):
            del arguments[0]  # launchers such as deepspeed add it; LOCAL_RANK has the same value
        arguments = _by_task(arguments)
        stage = arguments[0] if arguments and arguments[0] in COMMANDS else ""
        if stage not in ONLINE and not any(map(_ADDRESS.match, arguments)):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # libraries read it when imported
        _end_by_signals(stage)
        _run(stage, arguments)
    except KeyboardInterrupt:
        _fail(stage, "stopped; the same command continues", status=130)


def _by_task(arguments: list[str]) -> list[str]:
    """`evaluate --task NAME …` as a call of the subcommand that scores tasks of this name."""
    stage, *words = arguments or [""]
    if stage in TASK_FOLDERS and sys.stderr.isatty():  # not in the log of a rule
        _say("", f"{stage} NAME is also `{title(stage)} NAME`, with the same options")
    texts = [word.partition("=") for word in words]
    place = next((place for place, text in enumerate(texts) if text[0] == "--task"), None)
    if stage != "evaluate" or place is None:
        return arguments
    following = words[place + 1 : place + 2] or [""]
    name, width = (texts[place][2], 1) if texts[place][1] else (following[0], 2)
    from tokamake import plugins
    from tokamake.errors import choice

    tasks = {task: name for name, folder in TASK_FOLDERS.items() for task in plugins.names(folder)}
    if name not in tasks:
        fault = f"{name}: no such task" if name and name[0] != "-" else "has no value"
        _fail(stage, f"--task {fault}; {choice(name, [*tasks])}", status=EXIT_USER_ERROR)
    return [tasks[name], name, *words[:place], *words[place + width :]]


def _end_by_signals(stage: str) -> None:
    """Let signals of batch systems raise SignalExit, so that stages remove unfinished files."""
    from tokamake.runtime.exit_status import Stopped

    def stop_training(number: int, _frame: object) -> NoReturn:
        raise SignalExit(Stopped[signal.Signals(number).name])

    def stop(number: int, _frame: object) -> NoReturn:
        raise SignalExit(128 + number)

    if stage == "train":  # other signals stop it in the same way
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, stop_training)
    else:
        signal.signal(signal.SIGTERM, stop)


def _refuse_closed_descriptors(arguments: list[str]) -> None:
    """Check that the user has opened /dev/fd/N; a stage could open that number later."""
    for argument in arguments:
        if match := re.search(r"(?:/dev/fd|/proc/self/fd)/(\d+)$", argument):
            try:
                os.fstat(int(match[1]))
            except (OSError, OverflowError):
                _fail("", f"{argument}: not open; give a path", status=EXIT_USER_ERROR)


def _refuse_empty_paths(stage: str, bound: inspect.BoundArguments, *, arguments: list[str]) -> None:
    """Check that no path is empty, as an unset variable is: it would mean this folder."""
    if not any(argument == "" or argument.endswith("=") for argument in arguments):
        return
    for name, value in bound.arguments.items():
        option = f"--{name.replace('_', '-')}"
        is_positional = bound.signature.parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
        shown = _positional(option) if is_positional else option
        is_empty = (option, "") in pairwise(arguments) or f"{option}=" in arguments
        paths = value if isinstance(value, list | tuple) else [value]
        if (is_empty or is_positional) and Path() in paths:
            _fail(stage, f"{shown}: empty; give a path", status=EXIT_USER_ERROR)


def _for_cyclopts(stage: str, arguments: list[str]) -> list[str]:
    """Arguments in forms that cyclopts does not take for options."""
    if stage == "from-megatron-args" and "--" not in arguments:
        lines = [each for each in arguments if re.match(r"-\S*\s", each)]  # quoted, with all flags
        arguments = [*(each for each in arguments if each not in lines), "--", *lines]
    for option in ("--output", "--to"):
        if (option, "-") in pairwise(arguments):  # cyclopts takes a lone - for an option
            index = arguments.index(option)
            arguments = [*arguments[:index], f"{option}=-", *arguments[index + 2 :]]
    return arguments


def _run(stage: str, arguments: list[str]) -> None:
    gc.disable()  # Imports leave no garbage, and the search for it takes a tenth of the start.
    from cyclopts import CycloptsError

    from tokamake.errors import UserError, note_failure, of_system

    app = make_app(stage, has_all=arguments == [_HELP_ALL])
    arguments = _for_cyclopts(stage, ["--help"] if arguments == [_HELP_ALL] else arguments)
    try:
        run, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False)
        gc.freeze()
        gc.enable()
        _refuse_empty_paths(stage, bound, arguments=arguments)
        if any(map(_ADDRESS.match, arguments)):
            from tokamake.remote.local_copy import replace_addresses

            replace_addresses(bound.arguments)
        from tokamake.files import is_standard_output, is_stream

        output = bound.arguments.get("output", bound.arguments.get("target"))
        if stage in SEVERAL_FILES and output and is_stream(output):
            message = f"{output}: {stage} writes several files; name a folder or a prefix of files"
            _fail(stage, message, status=EXIT_USER_ERROR)
        if stage not in SEVERAL_FILES and output and output.is_dir():
            message = f"--output: {output} is a folder; name a file"
            _fail(stage, message, status=EXIT_USER_ERROR)
        # Printed lines must not mix with a file that it writes to standard output.
        to_stdout = output is not None and is_standard_output(output)
        with redirect_stdout(sys.stderr) if to_stdout else nullcontext():
            run(*bound.args, **bound.kwargs)
    except CycloptsError as error:
        note_failure(error)
        _fail(stage, _fault(app, stage, error=error), status=EXIT_USER_ERROR)
    except UserError as error:
        note_failure(error)
        if not error.among_ranks:
            _fail(stage, str(error), status=EXIT_USER_ERROR)
        from tokamake.runtime.rank_errors import exit_now

        _say(stage, str(error))
        exit_now(EXIT_USER_ERROR)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        note_failure(error)
        install = f"pip install 'tokamake[{extra}]'"
        _fail(stage, f"{package} is not installed; {install}", status=EXIT_USER_ERROR)
    except BrokenPipeError:  # the reader of our output has closed it
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        _fail(stage, f"{of_system(error)}; fix it and rerun", status=1)
    except (MemoryError, RuntimeError) as error:
        from tokamake.runtime.device import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        _fail(stage, f"out of memory: {str(error) or 'of this host'}; {_MORE_MEMORY}", status=1)


def _fault(app: "App", stage: str, *, error: "CycloptsError") -> str:
    """Message about words that the command line does not understand."""
    command = f"tokamake {title(stage)}{' NAME' * (stage in TASK_FOLDERS)}".strip()
    fault = (
        _missing_options(app, stage, error=error)
        or _unused_words(app, stage, error=error)
        or _setting_of_task(stage, error=error)
        or _one_line(str(error), is_missing=not getattr(error, "keyword", ""))
    )
    return f"{fault} See `{command} --help`."


def _missing_options(app: "App", stage: str, *, error: "CycloptsError") -> str:
    """Message that names all required arguments that a call lacks; empty for other errors."""
    from cyclopts import MissingArgumentError

    # A keyword: the option is there without its value. An unused option: it may be misspelt.
    unused = getattr(error, "unused_tokens", None) or []
    is_misspelt = any(word.startswith("-") for word in unused)
    if not isinstance(error, MissingArgumentError) or error.keyword or is_misspelt:
        return ""
    assert error.argument, "the error is about one"
    words = {word.partition("=")[0] for word in error.root_input_tokens or ()}
    first = error.argument.name if error.argument else ""
    missing = [
        _positional(argument.name) if argument.field_info.is_positional else argument.name
        for argument in app[stage].assemble_argument_collection()
        if argument.field_info.required
        and (argument.name == first or not argument.field_info.is_positional)
        and not words & {*argument.names}
    ]
    if not missing:  # an argument that begins with a minus sign took the place of another one
        return ""
    if len(missing) == len(unused) == 1:
        return f"{missing[0]} is missing; write {missing[0]} {shlex.quote(unused[0])}."
    verb, pronoun = ("is", "it") if len(missing) == 1 else ("are", "them")
    return f"{', '.join(missing)} {verb} missing; add {pronoun}."


def _unused_words(app: "App", stage: str, *, error: "CycloptsError") -> str:
    """Message about words that belong to no option; empty for other errors."""
    from cyclopts import UnusedCliTokensError

    if not isinstance(error, UnusedCliTokensError) or stage not in COMMANDS:
        return ""
    known = [*app[stage].assemble_argument_collection()]
    places = [_positional(each.name) for each in known if each.field_info.is_positional]
    options = [each.name for each in known if not each.field_info.is_positional]
    named = f"the options {', '.join(options)}" if len(options) <= _MOST_NAMED else "options"
    words = shlex.join(error.unused_tokens or [])
    return f"{words}: belongs to no option; {stage} takes {' and '.join([*places, named])}."


def _setting_of_task(stage: str, *, error: "CycloptsError") -> str:
    """Message about a setting of a task that is written as an option; empty for other errors."""
    option = re.match(r"Unknown option: \W*--([\w-]+)", str(error))
    if stage not in TASK_FOLDERS or not option:
        return ""
    from tokamake import plugins

    folder, name = TASK_FOLDERS[stage], option[1].replace("-", "_")
    tasks = {*plugins.names(folder)}
    task = next((word for word in error.root_input_tokens or () if word in tasks), "")
    if not task or name not in plugins.constant(folder, task, "SETTINGS", default=()):
        return ""
    return f"""--{option[1]}: a setting of {task}; write --settings '{{"{name}": VALUE}}'."""


def _positional(name: str) -> str:
    """Name of an argument without an option, as the usage of the subcommand shows it."""
    return name.lstrip("-").replace("-", "_").upper()


def make_app(stage: str = "", *, has_all: bool = False) -> "App":
    """Build the command line of one subcommand, or of all with only their summaries.

    Args:
        has_all: whether the help also lists subcommands that only rules call.
    """
    from cyclopts import App, Group, Parameter

    app = App(
        name="tokamake",
        help="Turn raw text into a trained language model, stage by stage.",
        help_epilogue=""
        if stage or has_all
        else f"`tokamake {_HELP_ALL}` also lists the subcommands that only rules call.",
        help_on_error=False,
        suppress_keyboard_interrupt=False,
        default_parameter=Parameter(negative_iterable=(), show_default=_shown_default),
    )
    groups = {name: Group(name, sort_key=place) for place, name in enumerate(GROUPS)}
    for name in [stage] if stage else COMMANDS:
        # With a summary given, the general help needs no import.
        app.command(
            f"{module_name(name)}:{function_name(name)}",
            name=name,
            help=None if stage else summary(name),
            help_epilogue=f"Example: `tokamake {title(name)} {COMMANDS[name].example}`",
            usage=_usage(name),
            group=groups[group_of(name)],
            show=has_all or bool(stage) or name not in ONLY_RULES,
        )
    if not stage:
        app.register_install_completion_command(
            help="Let bash, zsh or fish complete subcommands and options."
        )
    return app


def _usage(stage: str) -> str | None:
    """The usage of a subcommand that people type as another one."""
    return f"Usage: tokamake {title(stage)} NAME [OPTIONS]" if stage in TASK_FOLDERS else None


def _shown_default(value: object) -> str | None:
    """A default in `--help`; nothing for one that is empty."""
    return None if value in ("", (), []) else str(value)


def _one_line(text: str, *, is_missing: bool) -> str:
    """The message of cyclopts, without suggestions that do not help."""
    # The list of commands is cut off after a few; --help has all of them.
    line = re.sub(
        r' Available commands: .*|^Command "[\w-]+" parameter ', "", " ".join(text.split())
    )
    if is_missing:  # not an option that lacks its value
        line = line.replace(" requires an argument.", " is missing.")
    guess = re.search(r"^Unknown option: -*([\w-]+)\.( Did you mean -*([\w-]+)\?)", line)
    is_near = guess and SequenceMatcher(None, guess[1], guess[3]).ratio() > _NEAR
    return line if is_near or not guess else line.replace(guess[2], "")


def _fail(stage: str, message: str, *, status: int) -> None:
    _say(stage, message)
    os._exit(status) if status == 130 else sys.exit(status)


def _say(stage: str, message: str) -> None:
    sys.stdout.flush()
    command = f"tokamake {title(stage)}".strip()
    for line in message.splitlines():
        print(f"{command}: {line}", file=sys.stderr)
    sys.stderr.flush()
