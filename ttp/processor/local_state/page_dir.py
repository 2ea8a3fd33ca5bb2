"""Makes and removes the directory in which the rank-local pages of a job lie on this host.

Every processor holds a shared lock on the directory. The kernel drops the lock when the process ends, in whatever way.
The last processor to leave removes the directory. If all have crashed, no process holds a lock on the directory, and
the next processor on this host removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from functools import partial
from pathlib import Path

from ttp.config import RankEnv
from ttp.polling import poll
from ttp.processor.liveness import forks

SHARED_MEMORY = Path("/dev/shm")
NETWORK = Path("/proc/self/ns/net")
LOOPBACK = ("127.", "localhost", "::1", "[::1]")
"""How addresses begin that are loopback without a look at the name service, which may hang."""
LOCK_FILE = ".lock"
ROOM_BYTES = 4 << 20
"""With less free memory a host's pages may not fit; then they are kept in the run directory, on a disk."""
ROOM_FILES = 256
"""The same for the number of files: with fewer, each rank of a large host may not get its page and its sentinel."""
_ATTEMPTS = 5
_LOCK_S = 2.0
"""Seconds to wait for a process that is removing the directory. After that, another place for pages is used."""


class PageDirectory:
    """A directory of this user and job. It exists at least as long as this object is open.

    Args:
        run_dir: run directory of the job on this host; holds the pages where shared memory cannot.
        env: identity of this process.
        port: port of the job's controller. Address, port and run id together identify the job on this host; if the
            address is loopback, it is that of one network namespace.
        shared_memory: file system in memory in which the directory is made.
        host: this host's name, where several share one memory (containers, network namespaces); else empty.

    Raises:
        OSError: neither place can hold pages.
    """

    def __init__(
        self, run_dir: Path, env: RankEnv, port: int, shared_memory: Path = SHARED_MEMORY, host: str = ""
    ) -> None:
        remove_abandoned(shared_memory)
        network = _network() if env.master_addr.startswith(LOOPBACK) else ""
        key = hashlib.sha256(f"{env.master_addr}|{port}|{env.run_id}|{host}|{network}".encode()).hexdigest()[:12]
        self._lock = -1
        places = [shared_memory / f"{_prefix()}{key}", _fallback(run_dir)]
        if not _has_room(places[0]):
            places.reverse()
        reasons = []
        for path in places:
            if not (reason := self._claim(path)):
                self.path = path
                return
            reasons.append(f"{path}: {reason}")
        raise OSError(f"no place for the pages with this rank's local state ({'; '.join(reasons)})")

    def renew(self) -> None:
        """Make the directory again if it was removed, as systemd's RemoveIPC does when the user logs out.

        Raises:
            OSError: it cannot be made.
        """
        lost = self._lock
        if lost < 0 or _is_file(lost, self.path / LOCK_FILE):
            return
        if reason := self._claim(self.path):
            raise OSError(f"{self.path} was removed and cannot be made again: {reason}")
        os.close(lost)

    def close(self) -> None:
        """Release the directory. The last process that does so removes it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            _remove_if_abandoned(self.path)

    def _claim(self, path: Path) -> str:
        """Make the directory, and lock it with the other ranks. Return why that is not possible; empty: it is done."""
        for _ in range(_ATTEMPTS):
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.is_symlink() or path.lstat().st_uid != os.getuid():
                    return "it belongs to another user"
                lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                continue  # removed by a process that found it abandoned
            except OSError as problem:
                return problem.strerror or repr(problem)
            if not poll(partial(_shared, lock), _LOCK_S, 0.01):
                os.close(lock)
                return "another process has locked it"
            if _is_file(lock, path / LOCK_FILE):
                self._lock = lock
                forks.close_fd_in_children(lock)
                return ""
            os.close(lock)
        return "other processes remove it again and again"


def _shared(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_abandoned(shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's page directories that no process holds any more. Returns them."""
    return [path for path in _in_memory(shared_memory) if _remove_if_abandoned(path)]


def page_directories(run_dir: Path, shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Return where ranks of this user may have put pages: directories of all jobs on this host, and in ``run_dir``.

    The caller has to recognise the files of its own job by their contents.
    """
    return [*_in_memory(shared_memory), _fallback(run_dir)]


def _in_memory(shared_memory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [p for p in shared_memory.glob(f"{_prefix()}*") if p.is_dir() and not p.is_symlink()]
    return []


def _has_room(path: Path) -> bool:
    """Return whether a host's pages fit into a directory, or another rank of the host has found so and made it."""
    try:
        stat = os.statvfs(path.parent)
        bytes_fit = stat.f_blocks == 0 or stat.f_bavail * stat.f_frsize >= ROOM_BYTES  # 0: no limit
        return path.exists() or (bytes_fit and (stat.f_files == 0 or stat.f_favail >= ROOM_FILES))
    except OSError:
        return False


def _fallback(run_dir: Path) -> Path:
    return run_dir / "pages"


def _remove_if_abandoned(path: Path) -> bool:
    try:
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # just being made, or gone
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_file(lock, path / LOCK_FILE):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError:
        return False  # a process still holds it
    finally:
        os.close(lock)


def _is_file(fd: int, path: Path) -> bool:
    """Return whether ``path`` still is the file that ``fd`` is open on."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _network() -> str:
    """Return the identity of this network namespace: containers with equal settings may share ``/dev/shm`` only."""
    with contextlib.suppress(OSError):
        return str(NETWORK.stat().st_ino)
    return ""


def _prefix() -> str:
    return f"ttp-{os.getuid()}-"
