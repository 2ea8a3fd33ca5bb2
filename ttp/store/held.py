"""A checkpoint that is held in the memory of this host, until another process has brought it to the storage.

There is a directory for each ``save_dir``, which outlives the processes that use it::

    order.json   what is, or was last, to be brought to the storage
    memory/      a save_dir in memory: drafts, and the checkpoint
    writer       locked by the process that brings it to the storage (``ttp.launch.shadow``)
    readers      locked, together, by ranks that restore from it: it is not removed meanwhile
    state.json   how far the writer is
    speed        bytes a second that the storage has taken, as it was measured last
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from ttp.core.layout import Version
from ttp.errors import CheckpointError
from ttp.store import catalog, names
from ttp.store.manifest import Manifest

T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "ttp-held-"
RESERVE = 0.1
"""This part of the shared memory stays free for others."""
PROBE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be brought to the storage.

    Args:
        incident: of which the checkpoint is.
        draft: where it is made, in ``memory``.
        save_dir: where it goes.
        fallback_dir: where it goes if that refuses; empty: nowhere.
        keep: checkpoints to keep there.
        patience_s: how long is tried.
        began_unix_s: when ranks began to write it to memory.
    """

    incident: str
    draft: str
    save_dir: str
    fallback_dir: str
    keep: int
    patience_s: float
    began_unix_s: float


@dataclass(frozen=True, slots=True)
class State:
    """How far the writer is.

    Args:
        incident: of the order that it carries out.
        path: of the checkpoint, durable and verified; empty: there is none yet.
        size: bytes of it.
        written: bytes that the storage has taken, in all tries.
        problem: why the last try came to nothing.
    """

    incident: str = ""
    path: str = ""
    size: int = 0
    written: int = 0
    problem: str = ""


class Held:
    """See the module.

    Args:
        root: the directory; it need not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.memory = root, root / "memory"

    @classmethod
    def of(cls, save_dir: Path, shared_memory: Path = SHARED_MEMORY) -> Held:
        """The one for checkpoints that go to ``save_dir``."""
        try:
            found = save_dir.stat()
            place = f"{found.st_dev}:{found.st_ino}"  # containers may share the memory, and name other disks alike
        except OSError:
            place = ""
        key = hashlib.sha256(f"{os.path.realpath(save_dir)}|{place}".encode()).hexdigest()[:16]
        return cls(shared_memory / f"{PREFIX}{os.getuid()}-{key}")

    # ---------------------------------------------------------------------------------------------------- what is there

    @property
    def usable(self) -> bool:
        """Whether it exists and belongs to this user: nobody else has prepared the name."""
        try:
            status = self.root.lstat()
        except OSError:
            return False
        return self.root.is_dir() and not self.root.is_symlink() and status.st_uid == os.getuid()

    def make(self) -> None:
        """Make the directories.

        Raises:
            OSError: they cannot be made, or are somebody else's.
        """
        self.root.mkdir(mode=0o700, exist_ok=True)
        if not self.usable:
            raise PermissionError(f"{self.root} belongs to somebody else")
        self.memory.mkdir(mode=0o700, exist_ok=True)

    def checkpoint(self) -> tuple[Path, Manifest] | None:
        """The newest whole checkpoint that is held."""
        if not self.usable:
            return None
        with contextlib.suppress(CheckpointError):
            whole, _ = catalog.find_whole(self.memory, deep=False, enough=1)
            if whole:
                path = self.memory / whole[0].name
                return path, Manifest.load(path)
        return None

    def unfinished(self) -> Version:
        """The version that is held and is not known to be durable; 0: there is none."""
        found = self.checkpoint()
        if found is None or (self.state().incident == found[1].incident and self.state().path):
            return Version(0)
        return found[1].version

    def room(self, size: int) -> bool:
        """Whether ``size`` more bytes leave enough of the shared memory for others."""
        try:
            stat = os.statvfs(self.root.parent)
        except OSError:
            return False
        return (stat.f_bavail * stat.f_frsize) - size >= RESERVE * stat.f_blocks * stat.f_frsize

    # ----------------------------------------------------------------------------------------------------- what is said

    def order(self) -> Order | None:
        """What is, or was last, to be brought to the storage."""
        return self._read("order.json", Order)

    def give(self, order: Order) -> None:
        """Say what is to be brought to the storage; all who say so for one checkpoint say the same.

        Raises:
            OSError: that cannot be written.
        """
        self._write("order.json", asdict(order))

    def state(self) -> State:
        """How far the writer is."""
        return self._read("state.json", State) or State()

    def say(self, state: State) -> None:
        """Of the writer.

        Raises:
            OSError: that cannot be written.
        """
        self._write("state.json", asdict(state))

    def _read(self, name: str, kind: type[T]) -> T | None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return kind(**json.loads((self.root / name).read_text()))
        return None

    def _write(self, name: str, facts: dict[str, object]) -> None:
        draft = self.root / f".{name}.{os.getpid()}"
        draft.write_text(json.dumps(facts))
        draft.replace(self.root / name)

    # ------------------------------------------------------------------------------------------------------------ speed

    def speed(self) -> float:
        """Bytes a second that the storage takes; 0: not known."""
        with contextlib.suppress(OSError, ValueError):
            return float((self.root / "speed").read_text())
        return 0.0

    def note_speed(self, size: int, seconds: float) -> None:
        """So many bytes were durable after so long. Never raises."""
        with contextlib.suppress(OSError):
            self.make()
            draft = self.root / f".speed.{os.getpid()}"
            draft.write_text(repr(size / max(seconds, 1e-6)))
            draft.replace(self.root / "speed")

    def measure(self, save_dir: Path) -> None:
        """Write a file to the storage and remove it. Never raises."""
        probe = save_dir / f"{names.PROBE_PREFIX}speed-{os.getpid()}"
        data = os.urandom(1 << 16) * (PROBE_BYTES >> 16)
        with contextlib.suppress(OSError):
            try:
                began = time.monotonic()
                with probe.open("xb", buffering=0) as file:
                    file.write(data)
                    os.fsync(file.fileno())
                self.note_speed(PROBE_BYTES, time.monotonic() - began)
            finally:
                probe.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------------------ locks

    @contextlib.contextmanager
    def serving(self) -> Iterator[bool]:
        """Be the one process that brings it to the storage. Yields False if there is another one."""
        with self._locked("writer", fcntl.LOCK_EX | fcntl.LOCK_NB) as mine:
            yield mine

    def is_served(self) -> bool:
        """Whether a process lives that brings it to the storage."""
        with self._locked("writer", fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
            return not free

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """What is held stays until the block is left. Where nothing is, nothing is done."""
        if not self.usable:
            yield
            return
        with self._locked("readers", fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[bool]:
        handle = os.open(self.root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(handle, how)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(handle)

    def drop(self, but: str = "") -> None:
        """Remove what is held, once nobody reads it, and drafts that do not begin with ``but``. For the writer."""
        with contextlib.suppress(FileNotFoundError), self._locked("readers", fcntl.LOCK_EX):  # the launcher has ended
            for path in list(self.memory.iterdir()):
                if not (but and path.name.startswith(but)):
                    shutil.rmtree(path, ignore_errors=True)
