"""Lock of a run's output folder: ranks can outlive a launcher that was killed, and train on.

Two locks protect the folder, because neither does everywhere. `flock` ends with its process, but
some file systems have none, or one that other hosts do not see. A file that names its owner is seen
by all hosts, but stays when its owner is killed.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from tokamake.errors import TemporaryError, UserError
from tokamake.files import create_text

_LOCAL_FLOCK = {"nolock", "local_lock=flock", "local_lock=all"}
"""Mount options of NFS with which other hosts do not see locks."""


class _Owner(NamedTuple):
    """The process that trains: the words of the owner file."""

    pid: str
    started: str
    """Ticks from the boot to its start: process ids are used again."""
    namespace: str
    """PID namespace, in which `pid` counts."""
    boot: str
    host: str

    @classmethod
    def here(cls) -> "_Owner":
        pid, boot = f"{os.getpid()}", Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            pid, _started(pid), str(Path("/proc/self/ns/pid").readlink()), boot, os.uname().nodename
        )


def _started(pid: str) -> str:
    """Ticks from the boot to the start of a process; empty: there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]  # field 22; the second, a name, may have spaces


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Lock an output folder.

    Raises:
        TemporaryError: another process trains there.
        UserError: one of another host may train there.
    """
    lock, owner = (output.with_name(f".{output.name}.{end}") for end in ("lock", "owner"))
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as stream:
        has_flock = _flock(stream, output)
        _write_owner(owner, output, has_flock=has_flock)
        stream.truncate(0)
        stream.write(f"{os.getpid()} on {os.uname().nodename}")
        stream.flush()
        try:
            yield
        finally:
            owner.unlink(missing_ok=True)


def _flock(stream: IO[str], output: Path) -> bool:
    """Lock a file; return False if its file system has no locks.

    Raises:
        TemporaryError: another process has locked it.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(output, Path(stream.name).read_text().strip()) from None
    except OSError:  # some parallel file systems are mounted without
        return False
    return True


def _in_use(output: Path, process: str) -> TemporaryError:
    return TemporaryError(f"{output}: another process trains there; end it (pid {process})")


def _write_owner(file: Path, output: Path, *, has_flock: bool) -> None:
    """Create the owner file; replace that of a process that has ended.

    Raises:
        TemporaryError: the process that the file names trains there.
        UserError: this host cannot know whether it does.
    """
    here = _Owner.here()
    try:
        create_text(file, " ".join(here))  # an empty file would lock the folder for ever
        return
    except FileExistsError:
        words = file.read_text(errors="replace").split()
    owner = _Owner(*words) if len(words) == len(here) else None
    is_here = owner and (owner.host, owner.namespace) == (here.host, here.namespace)
    if owner and is_here and (owner.boot, _started(owner.pid)) == (here.boot, owner.started):
        raise _in_use(output, f"{owner.pid} on {owner.host}")
    # A process that trains would hold the flock, if this host can see it.
    is_free = has_flock and owner and (owner.boot == here.boot or _is_flock_shared(file.parent))
    if not is_here and not is_free:
        process = f"pid {owner.pid} on {owner.host}" if owner else "its owner is not known"
        raise UserError(
            f"{output}: locked by a process of another host ({process}); if that process has "
            f"ended, remove {file}"
        )
    stale = file.with_name(f"{file.name}.{here.pid}")
    with suppress(FileNotFoundError):  # another process replaces it
        file.rename(stale)
        if stale.read_text(errors="replace").split() != words:  # another process was faster
            stale.rename(file)
            raise _in_use(output, file.read_text(errors="replace"))
        stale.unlink()
    _write_owner(file, output, has_flock=has_flock)


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
