"""Python with torch, tokamake and megatron.core, in forks of a server that has imported them."""

import gc
import sys
from pathlib import Path

from tests.support.fork_server import Server, end_after
from tests.support.tokamake_server import run_python, set_num_threads


def _main() -> None:
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.parallel_state  # noqa: F401

    gc.collect()
    gc.freeze()
    if request := Server(Path(sys.argv[1])).serve():
        set_num_threads()
        end_after(lambda: run_python(request.arguments))


if __name__ == "__main__":
    _main()
