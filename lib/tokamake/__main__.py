"""Entry point of `tokamake`, and of `python -m tokamake` for torchrun, mpiexec and srun."""

import os
import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C during its imports prints one line: nothing has begun."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by nohup
        signal.signal(signal.SIGINT, lambda *_: _stop())
    from tokamake import cli

    cli.main()
    ranks = sys.modules.get("tokamake.runtime.rank_errors")
    if ranks is not None and ranks.has_left():
        ranks.exit_now(0)


def _stop() -> None:
    os.write(2, b"tokamake: stopped; the same command continues\n")
    os._exit(130)


if __name__ == "__main__":
    main()
