"""`tokamake` for the jobs of workflows, in forks of a server that has torch and transformers.

Jobs run `tokamake` of the environment of Snakemake's Python. `programs()` is such an environment.
Its `tokamake` is a small client: a fork of the server does the work with the client's arguments,
folder, variables and files. The client passes signals on to it, and ends as it ends; if the client
is killed, so is the fork. Commands that do not need torch run as usual.
"""

import gc
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

VARIABLE = "TOKAMAKE_SERVER"
"""Environment variable with the server's socket, by which the client finds it."""
_SERVED = {"train", "evaluate", "generate", "convert", "plot", "report", "compare"}
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_CLIENT = f"""\
#!{sys.executable} -IS
import json, os, signal, socket, sys

real, arguments = {str(Path(sys.prefix) / "bin/tokamake")!r}, sys.argv[1:]
path = os.environ.get({VARIABLE!r})
if not path or not {_SERVED!r} & {{*arguments[:1]}}:
    os.execv(real, [real, *arguments])
server = socket.socket(socket.AF_UNIX)
for number in {[int(number) for number in _PASSED_ON]}:
    signal.signal(number, lambda number, _: server.send(bytes([number])))
server.connect(path)
request = json.dumps([[real, *arguments], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "little")], [0, 1, 2])
server.sendall(request)
code = int(server.recv(16) or b"70")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def programs() -> Path:
    """Python of an environment like this one, whose `tokamake` is the client."""
    folder, own = Path(tempfile.mkdtemp(prefix="programs-")), Path(sys.prefix)
    (folder / "bin").mkdir()
    (folder / "lib").symlink_to(own / "lib")
    shutil.copy(own / "pyvenv.cfg", folder)
    (folder / "bin/python").symlink_to(sys.executable)
    (folder / "bin/snakemake").symlink_to(own / "bin/snakemake")
    (folder / "bin/tokamake").write_text(_CLIENT)
    (folder / "bin/tokamake").chmod(0o755)
    return folder / "bin/python"


@cache
def address() -> str:
    """Socket of the server of this process; it ends when its input does."""
    path = programs().parent.parent / "socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.tokamake_server", str(path)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    _SERVERS.append(server)
    return str(path)


_SERVERS: list[subprocess.Popen[bytes]] = []
"""Keeps its input open."""


class _Server:
    """Forks for each client; signals and results go through the client's connection."""

    def __init__(self, path: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._clients: dict[int, socket.socket] = {}  # by the process that works for it
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeups = reading, writing
        for source in (self._listener, reading, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Serve until the input ends; in a fork, return the arguments of its work."""
        print("ready", flush=True)
        while True:
            for key, _ in self._selector.select():
                source: Any = key.fileobj
                if source is sys.stdin:
                    return None
                if source is self._listener:
                    if work := self._accept():
                        return work
                elif source is self._wakeups[0]:
                    source.recv(4096)
                    self._answer()
                else:
                    self._pass_on(source, key.data)

    def _accept(self) -> list[str] | None:
        client, _ = self._listener.accept()
        size, files, _, _ = socket.recv_fds(client, 4, 3)
        missing, request = int.from_bytes(size, "little"), b""
        while len(request) < missing:
            request += client.recv(missing - len(request))
        arguments, folder, variables = json.loads(request)
        if pid := os.fork():
            self._clients[pid] = client
            self._selector.register(client, selectors.EVENT_READ, pid)
            for file in files:
                os.close(file)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in (client, self._listener, *self._wakeups, *self._clients.values()):
            connection.close()
        self._selector.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        return [*arguments]

    def _answer(self) -> None:
        """Tell clients how their forks ended."""
        for pid in [*self._clients]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                client = self._clients.pop(pid)
                self._selector.unregister(client)
                with suppress(OSError):  # it was killed
                    client.send(str(os.waitstatus_to_exitcode(status)).encode())
                client.close()

    def _pass_on(self, client: socket.socket, pid: int) -> None:
        """Pass signals of a client on to its fork; kill the fork of a client that is gone."""
        try:
            numbers = client.recv(64) or bytes([signal.SIGKILL])
        except OSError:
            numbers = bytes([signal.SIGKILL])
        for number in numbers:
            if pid in self._clients:
                os.kill(pid, number)
        if signal.SIGKILL in numbers and pid in self._clients:
            self._selector.unregister(client)
            self._clients.pop(pid).close()
            os.waitpid(pid, 0)


def _main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # as these commands set it
    import torch
    import torch._dynamo

    import tokamake.checkpoint.compare_logits
    import tokamake.checkpoint.convert
    import tokamake.evaluate.held_out
    import tokamake.evaluate.perplexity
    import tokamake.inference.engine
    import tokamake.inference.model
    import tokamake.report.compare
    import tokamake.report.plot
    import tokamake.train.backends.native
    import tokamake.train.trainer  # noqa: F401
    from tokamake import cli

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    arguments = _Server(sys.argv[1]).serve()
    if arguments is None:
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    sys.exit(cli.main())


if __name__ == "__main__":
    _main()
