"""Servers whose forks are programs that have imported what they need: torch takes seconds.

A program of such a server is a small client. A fork of the server does its work with the client's
arguments, folder, variables and open files. The client passes signals on to the fork, and ends as
it ends; if the client is killed, so is the fork. All workers of pytest-xdist share the servers,
which end with the run of pytest.
"""

import atexit
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import ROOT

_VARIABLE = "TOKAMAKE_TEST_SERVERS"
"""Environment variable with the folder that all processes of a run of pytest share."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
for number in {signals}:
    signal.signal(number, lambda number, _: server.send(bytes([number])))
server.connect({socket!r})
files = [0, 1, 2]
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        if number > 2 and os.get_inheritable(number):
            files.append(number)
    except OSError:  # that of the list itself
        pass
request = json.dumps([{program!r}, sys.argv[1:], os.getcwd(), dict(os.environ), files]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "little")], files)
server.sendall(request)
for number in files[3:]:
    os.close(number)
try:
    code = int(server.recv(16) or b"70")
except ConnectionError:  # the server was killed
    code = 70
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_MOST_FILES = 64
_ENDED: list[int] = []
"""Exit status of this fork, at its end."""
_STARTED: list[subprocess.Popen[bytes]] = []


class Request(NamedTuple):
    """Work for a fork, which has already taken the client's folder, variables and files."""

    program: str
    arguments: list[str]


def end_after(work: Callable[[], object]) -> None:
    """Do the work of a fork and end it, without a teardown of all modules, which takes long."""
    code: object = None
    try:
        work()
    except SystemExit as error:
        code = error.code
        if not isinstance(code, int | None):
            raise
    _ENDED.append(code or 0)
    sys.exit(code)


@atexit.register  # before all others, so that it is the last
def _end() -> None:
    if _ENDED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_ENDED[0])


def shared_folder() -> Path:
    """Folder of the run of pytest; its main process must call this first, and removes it."""
    if _VARIABLE not in os.environ:
        folder = tempfile.mkdtemp(prefix="servers-")
        os.mkfifo(f"{folder}/alive")
        # Servers read from it; they reach its end when this process ends.
        os.open(f"{folder}/alive", os.O_RDWR)
        os.environ[_VARIABLE] = folder
        atexit.register(_remove, folder, os.getpid())
    return Path(os.environ[_VARIABLE])


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # no fork of it
        shutil.rmtree(folder, ignore_errors=True)


def address(module: str, python: str = sys.executable) -> Path:
    """Socket of the server that a module of this folder runs; start it if it does not run."""
    folder = shared_folder()
    path = folder / module
    with path.with_suffix(".lock").open("w") as lock, (folder / "alive").open("rb") as alive:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            server = subprocess.Popen(
                [python, "-m", f"tests.support.{module}", str(path)],
                cwd=ROOT, stdin=alive, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert server.stdout is not None
            assert b"ready\n" in iter(server.stdout.readline, b""), f"{module} failed"
            server.stdout.close()
            _STARTED.append(server)
    return path


def write_client(path: Path, server: Path, *, program: str) -> None:
    """Write a program that a server works for, which knows the program by a name."""
    signals = [int(number) for number in _PASSED_ON]
    values = {"signals": signals, "socket": str(server), "program": program}
    path.write_text(_CLIENT.format(python=sys.executable, **values))
    path.chmod(0o755)


class Server:
    """Forks for each client; signals and results go through the client's connection."""

    def __init__(self, path: Path, *, grouped: Container[str] = ()) -> None:
        """Serve at a path; signals go to a fork and its children if its program is `grouped`."""
        self._path, self._grouped = path, grouped
        self._groups: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._clients: dict[int, socket.socket] = {}  # by the process that works for it
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeups = reading, writing
        for source in (self._listener, reading, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Serve until the input ends; in a fork, return its work."""
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        print("ready", flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        while True:
            for key, _ in self._selector.select():
                source: Any = key.fileobj
                if source is sys.stdin:
                    signal.set_wakeup_fd(-1)
                    for pid in self._clients:
                        self._kill(pid, signal.SIGKILL)
                    shutil.rmtree(self._path.parent, ignore_errors=True)
                    return None
                if source is self._listener:
                    if work := self._accept():
                        return work
                elif source is self._wakeups[0]:
                    source.recv(4096)
                    self._answer()
                else:
                    self._pass_on(source, key.data)

    def _accept(self) -> Request | None:
        client, _ = self._listener.accept()
        size, files, _, _ = socket.recv_fds(client, 4, _MOST_FILES)
        length, request = int.from_bytes(size, "little"), b""
        while part := client.recv(length - len(request)):
            request += part
        if not length or len(request) < length:  # the client was killed
            client.close()
            for file in files:
                os.close(file)
            return None
        program, arguments, folder, variables, numbers = json.loads(request)
        pid = os.fork()
        if program in self._grouped:  # both do it: either may be the first
            os.setpgid(pid, pid)
        if pid:
            self._clients[pid] = client
            # A process may have the number of one that has ended.
            (self._groups.add if program in self._grouped else self._groups.discard)(pid)
            self._selector.register(client, selectors.EVENT_READ, pid)
            for file in files:
                os.close(file)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in (client, self._listener, *self._wakeups, *self._clients.values()):
            connection.close()
        self._selector.close()
        _take(files, numbers)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        return Request(program, arguments)

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
                self._kill(pid, number)
        if signal.SIGKILL in numbers and pid in self._clients:
            self._selector.unregister(client)
            self._clients.pop(pid).close()
            os.waitpid(pid, 0)

    def _kill(self, pid: int, number: int) -> None:
        if pid in self._groups:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _take(files: list[int], numbers: list[int]) -> None:
    """Give files the numbers that they have in the client."""
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 4 * _MOST_FILES) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(apart, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
