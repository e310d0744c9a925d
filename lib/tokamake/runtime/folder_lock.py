"""Lock of a folder that one process writes: the output of a run, or a data folder.

Ranks can outlive a launcher that was killed, and train on. Several clones can share `results/`.

Two locks protect the folder, because neither works everywhere. `flock` ends with its process, but
some file systems have none, or one that other hosts do not see. A file that names its owner is seen
by all hosts, but stays when its owner is killed.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

from tokamake.errors import TemporaryError, UserError
from tokamake.files import create_text

_LOCAL_FLOCK = {"nolock", "local_lock=flock", "local_lock=all"}
"""Mount options of NFS with which other hosts do not see locks."""


class _Owner(NamedTuple):
    """The process that writes there: the words of the owner file."""

    pid: str
    started: str
    """Ticks from the boot to its start: process ids are used again."""
    namespace: str
    """PID namespace, in which `pid` counts."""
    boot: str
    host: str
    folder: str
    """Its working directory, by which users know one of several clones."""

    @classmethod
    def here(cls) -> "_Owner":
        pid, (namespace, host) = f"{os.getpid()}", _place()
        return cls(pid, _started(pid), namespace, _boot(), host, ascii(str(Path.cwd())))

    @classmethod
    def parse(cls, text: str) -> "_Owner | None":
        words = text.split(" ", 5)
        return cls(*words) if len(words) == 6 else None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} in {self.folder}"

    @property
    def is_here(self) -> bool:
        """Whether its process id can be looked up here."""
        return (self.namespace, self.host) == _place()

    @property
    def lives(self) -> bool:
        """Whether the process runs; only for a process of this host."""
        return (self.boot, self.started) == (_boot(), _started(self.pid))


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _place() -> tuple[str, str]:
    """PID namespace and host of this process."""
    return str(Path("/proc/self/ns/pid").readlink()), os.uname().nodename


def _started(pid: str) -> str:
    """Ticks from the boot to the start of a process; empty: there is none, or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # the second field, a name, may have spaces
    return "" if fields[0] in "ZX" else fields[19]  # fields 3 and 22


def this_process() -> str:
    """Words that name this process: id, start time, PID namespace, boot, host, folder."""
    return " ".join(_Owner.here())


class WritingProcess(NamedTuple):
    """A process that writes a folder, or has done so until it was killed."""

    pid: str
    host: str
    lives: bool | None
    """Whether it runs; None: it is a process of another host."""


def writer(words: str) -> WritingProcess | None:
    """The process that `this_process` has named; None if the words name none."""
    owner = _Owner.parse(words)
    return owner and WritingProcess(owner.pid, owner.host, owner.lives if owner.is_here else None)


def writer_of(output: Path) -> WritingProcess | None:
    """The process that locks an output folder; None: none does, the last one has ended."""
    try:
        return writer(_file(output, "owner").read_text(errors="replace"))
    except OSError:
        return None


def _file(output: Path, end: str) -> Path:
    return output.with_name(f".{output.name}.{end}")


@contextmanager
def locked(output: Path, doing: str = "trains") -> Iterator[None]:
    """Lock an output folder.

    Args:
        doing: the work of a process with the lock, for messages.

    Raises:
        TemporaryError: another process does it there.
        UserError: one of another host may do it.
    """
    lock, owner = _file(output, "lock"), _file(output, "owner")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as stream:
        in_use = f"{output}: another process {doing} there; end it"
        has_flock = _flock(stream, in_use)
        _write_owner(owner, in_use, has_flock=has_flock)
        stream.truncate(0)
        stream.write(str(_Owner.here()))
        stream.flush()
        try:
            yield
        finally:
            owner.unlink(missing_ok=True)


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Wait until no other process makes a file; where the file system has no locks, go on."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("a") as stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _flock(stream: IO[str], in_use: str) -> bool:
    """Lock a file unless another process has; return False if its file system has no locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TemporaryError(f"{in_use} ({Path(stream.name).read_text().strip()})") from None
    except OSError:  # some parallel file systems are mounted without
        return False
    return True


def _write_owner(file: Path, in_use: str, *, has_flock: bool) -> None:
    """Create the owner file; replace the file of a process that has ended."""
    here = _Owner.here()
    try:
        create_text(file, " ".join(here))  # an empty file would lock the folder for ever
        return
    except FileExistsError:
        text = file.read_text(errors="replace")
    owner = _Owner.parse(text)
    is_here = owner and owner.is_here
    if owner and is_here and owner.lives:
        raise TemporaryError(f"{in_use} ({owner})")
    # A process that trains would hold the flock, if this host can see it.
    is_free = has_flock and owner and (owner.boot == here.boot or _is_flock_shared(file.parent))
    if not is_here and not is_free:
        raise UserError(
            f"{in_use.partition(': ')[0]}: locked by a process of another host "
            f"({owner or 'its owner is not known'}); if that process has ended, remove {file}"
        )
    stale = file.with_name(f"{file.name}.{here.pid}")
    with suppress(FileNotFoundError):  # another process replaces it
        file.rename(stale)
        if stale.read_text(errors="replace") != text:  # another process was faster
            stale.rename(file)
            raise TemporaryError(in_use)
        stale.unlink()
    _write_owner(file, in_use, has_flock=has_flock)


def _is_flock_shared(folder: Path) -> bool:
    """Whether other hosts see the flocks in a folder, by the mount of its file system."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    folders = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    # Later mounts cover earlier ones.
    of_folder = [mount for mount in reversed(mounts) if mount[1] in folders]
    if not of_folder:  # below chroot, the file system of / is not listed
        return False
    _, _, kind, options, *_ = max(of_folder, key=lambda mount: len(mount[1]))
    if kind == "lustre":
        return "flock" in options.split(",")
    return kind in ("gpfs", "ceph") or (
        kind in ("nfs", "nfs4") and not _LOCAL_FLOCK & {*options.split(",")}
    )
