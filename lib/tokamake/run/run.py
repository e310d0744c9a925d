"""Tool `run`: start the workflow and show it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from tokamake.run.display import Display

_DEFAULT_PROFILE = "local"
_TICK_SECONDS = 0.5


def run(
    config: Path,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    profile: str = "",
    dry_run: Annotated[bool, Parameter(alias="-n")] = False,
    verbose: bool = False,
) -> None:
    """Run the workflow with a config, and show its stages.

    It starts `snakemake --profile PROFILE --configfile CONFIG`, prints that command, and ends with
    its exit status.

    Args:
        config: Config file.
        arguments: Targets, such as `train`; settings, such as `train.train_steps=50`; behind a
            double dash, options of Snakemake.
        profile: Name or folder of a profile. By default $SNAKEMAKE_PROFILE, else local.
        dry_run: List the jobs that would run, with the reason of each; run none.
        verbose: Show Snakemake's own output.
    """
    from tokamake.run.closing import interrupted, summary
    from tokamake.run.command_line import (
        DRY_RUN,
        check_config,
        parse,
        shown,
        snakemake_command,
    )
    from tokamake.run.display import Display
    from tokamake.run.snakemake_process import SnakemakeProcess

    request = parse([each for each in arguments if each != "--"])
    check_config(config)
    profile = profile or os.environ.get("SNAKEMAKE_PROFILE", _DEFAULT_PROFILE)
    command = snakemake_command(config, request, profile=profile, is_dry_run=dry_run)
    dry_run = not {*command}.isdisjoint(DRY_RUN)  # also as Snakemake spells it
    print(shown(command), file=sys.stderr, flush=True)
    python = [sys.executable, "-m", "snakemake", *command[1:]]
    start = time.monotonic()
    display = Display(
        is_live=sys.stderr.isatty() and not verbose, is_dry_run=dry_run, unlock=_unlock_command()
    )
    try:
        if verbose:
            status = SnakemakeProcess(python, on_stop=display.stop).wait()
        else:
            status = _show(python, display)
    finally:
        display.close()
    again = shown(["tokamake", *sys.argv[1:]])
    if display.is_stopping and status != 0:
        lines = ["stopped"] if dry_run else [interrupted(display.stages.runs, again=again)]
    elif status == 0 and display.stages.num_done and not dry_run:
        lines = summary(display.stages, config=config, seconds=time.monotonic() - start)
    elif display.failures:
        lines = [f"{', '.join(display.failures)} failed; fix the cause, then continue: {again}"]
    else:
        lines = []
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)
    sys.exit(status)


def _unlock_command() -> str:
    from tokamake.run.command_line import DRY_RUN, shown

    words = [each for each in sys.argv[1:] if each not in DRY_RUN]
    return shown(["tokamake", *words, *([] if "--" in words else ["--"]), "--unlock"])


def _show(command: list[str], display: "Display") -> int:
    """Start Snakemake and show its events until it ends; return its exit status."""
    import json
    from selectors import EVENT_READ, DefaultSelector

    from snakemake_logger_plugin_tokamake import EVENTS
    from tokamake.run.snakemake_process import SnakemakeProcess

    reader, writer = os.pipe()
    process = SnakemakeProcess(
        [*command[:3], "--logger", "tokamake", *command[3:]],
        on_stop=display.stop,
        stdout=subprocess.PIPE,
        pass_fds=[writer],
        variables={EVENTS: str(writer)},
    )
    os.close(writer)
    assert process.stdout is not None
    with DefaultSelector() as selector:
        texts = {reader: b"", process.stdout.fileno(): b""}
        for descriptor in texts:
            selector.register(descriptor, EVENT_READ)
        while texts:
            ready = [key for key, _ in selector.select(_TICK_SECONDS)]
            # Events first: a job begins before it prints.
            for key in sorted(ready, key=lambda key: key.fd != reader):
                read = os.read(key.fd, 1 << 16)
                *lines, texts[key.fd] = (texts[key.fd] + read).split(b"\n")
                if not read:
                    selector.unregister(key.fd)
                    lines = [each for each in [texts.pop(key.fd)] if each]
                for line in lines:
                    if key.fd == reader:
                        display.show(json.loads(line))
                    else:
                        display.output(line.decode(errors="replace"))
            display.tick()
    os.close(reader)
    return process.wait()
