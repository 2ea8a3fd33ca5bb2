"""A checkpoint in the shared memory of this host, held there until a writer process has copied it to the storage.

Each ``save_dir`` has one directory in shared memory, which outlives the processes that use it::

    order.json   the last order to the writer: which checkpoint to copy to which directory
    memory/      a save_dir in memory: drafts and the checkpoint
    writer       lock file of the writer (``ttp.launch.shadow``)
    readers      lock file that restoring ranks share: nothing is removed while one of them holds it
    state.json   the progress of the writer
    speed        the last measured speed of the storage, in bytes per second
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from ttp.core.layout import Version
from ttp.errors import CheckpointError
from ttp.store import catalog, names
from ttp.store.durable import replace_file
from ttp.store.manifest import Manifest

T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "ttp-held-"
RESERVE = 0.1
"""Fraction of the shared memory that is left free for other programs."""
PROBED_S = 0.2
"""Seconds for which a writer tries to get its lock, because ``is_served`` of another process takes it for a moment."""
PROBE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """An order to the writer: copy one checkpoint from memory to the storage.

    Args:
        incident: id of the incident in which the checkpoint was made.
        draft: name of the checkpoint's draft directory in ``memory``.
        save_dir: directory of the storage that receives the checkpoint.
        fallback_dir: directory that receives it if ``save_dir`` refuses; empty: none.
        keep: number of checkpoints to keep in that directory.
        patience_s: seconds for which the writer tries.
        began_unix_s: time at which ranks began to write the checkpoint to memory, in Unix seconds.
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
    """The progress of the writer.

    Args:
        incident: id of the incident whose checkpoint the writer copies.
        path: path of the durable, verified checkpoint on the storage; empty: there is none yet.
        size: size of that checkpoint in bytes.
        written: bytes written to the storage, of all tries together.
        problem: why the last try failed; empty: it did not.
    """

    incident: str = ""
    path: str = ""
    size: int = 0
    written: int = 0
    problem: str = ""


class Held:
    """The directory in shared memory that belongs to one ``save_dir``; the module's docstring lists its files.

    Args:
        root: path of the directory, which need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.memory = root, root / "memory"

    @classmethod
    def of(cls, save_dir: Path, shared_memory: Path = SHARED_MEMORY) -> Held:
        """Return the directory in shared memory for checkpoints of ``save_dir``."""
        try:
            found = save_dir.stat()
            place = f"{found.st_dev}:{found.st_ino}"  # containers may share memory and use one path for different disks
        except OSError:
            place = ""
        key = hashlib.sha256(os.fsencode(f"{os.path.realpath(save_dir)}|{place}")).hexdigest()[:16]
        return cls(shared_memory / f"{PREFIX}{os.getuid()}-{key}")

    # --------------------------------------------------------------------------------------------------------- contents

    @property
    def usable(self) -> bool:
        """True if the directory exists, is no link and belongs to this user: another user may have taken the name."""
        try:
            status = self.root.lstat()
        except OSError:
            return False
        return self.root.is_dir() and not self.root.is_symlink() and status.st_uid == os.getuid()

    def make(self) -> None:
        """Make the directories.

        Raises:
            OSError: They cannot be made, or belong to another user.
        """
        self.root.mkdir(mode=0o700, exist_ok=True)
        if not self.usable:
            raise PermissionError(f"{self.root} is a link, or belongs to another user")
        self.memory.mkdir(mode=0o700, exist_ok=True)

    def names(self) -> list[str]:
        """Return the names in ``memory``, of drafts and of checkpoints."""
        with contextlib.suppress(OSError):
            return [path.name for path in self.memory.iterdir()]
        return []

    def checkpoint(self) -> tuple[Path, Manifest] | None:
        """Return the path and manifest of the newest whole checkpoint in memory; None: there is none."""
        if not self.usable:
            return None
        with contextlib.suppress(CheckpointError):
            whole, _ = catalog.find_whole(self.memory, deep=False, enough=1)
            if whole:
                path = self.memory / whole[0].name
                return path, Manifest.load(path)
        return None

    def unfinished(self) -> Version:
        """Return the version of the checkpoint in memory that is not known to be durable; 0: there is none."""
        found = self.checkpoint()
        if found is None or (self.state().incident == found[1].incident and self.state().path):
            return Version(0)
        return found[1].version

    def room(self, size: int) -> bool:
        """Return whether ``size`` more bytes leave the fraction ``RESERVE`` of the shared memory free."""
        try:
            stat = os.statvfs(self.root.parent)
        except OSError:
            return False
        return (stat.f_bavail * stat.f_frsize) - size >= RESERVE * stat.f_blocks * stat.f_frsize

    # ----------------------------------------------------------------------------------------------- order and progress

    def order(self) -> Order | None:
        """Return the last order to the writer; None: there is none that can be read."""
        return self._read("order.json", Order)

    def give(self, order: Order) -> None:
        """Give the writer an order. All ranks that write one checkpoint give the same order.

        Raises:
            OSError: The order cannot be written.
        """
        self._write("order.json", asdict(order))

    def state(self) -> State:
        """Return the progress of the writer; the initial ``State`` if none can be read."""
        return self._read("state.json", State) or State()

    def say(self, state: State) -> None:
        """Replace the progress of the writer. Only the writer calls it.

        Raises:
            OSError: The progress cannot be written.
        """
        self._write("state.json", asdict(state))

    def _read(self, name: str, kind: type[T]) -> T | None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return kind(**json.loads((self.root / name).read_text()))
        return None

    def _write(self, name: str, facts: object) -> None:
        replace_file(self.root / name, json.dumps(facts).encode())

    # ------------------------------------------------------------------------------------------------------------ speed

    def speed(self) -> float:
        """Return the speed of the storage in bytes per second; 0: not known."""
        with contextlib.suppress(OSError, ValueError):
            return float((self.root / "speed").read_text())
        return 0.0

    def note_speed(self, size: int, seconds: float) -> None:
        """Note the speed of the storage: it made ``size`` bytes durable in ``seconds``. Never raises."""
        with contextlib.suppress(OSError):
            self.make()
            self._write("speed", size / max(seconds, 1e-6))

    def measure(self, save_dir: Path) -> None:
        """Measure the speed of the storage with a file of ``PROBE_BYTES``, which is removed again. Never raises."""
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
        """Be the only writer while the block runs. Yields False if another process is the writer."""
        until = time.monotonic() + PROBED_S
        while True:
            with self._locked("writer", fcntl.LOCK_EX | fcntl.LOCK_NB) as mine:
                if mine or time.monotonic() > until:
                    yield mine
                    return
            time.sleep(PROBED_S / 20)

    def is_served(self) -> bool:
        """Return whether a writer process is running."""
        how = fcntl.LOCK_EX | fcntl.LOCK_NB
        with contextlib.suppress(FileNotFoundError), self._locked("writer", how, create=False) as free:
            return not free
        return False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the writer from removing the checkpoint during the block, if the directory is there and can be used."""
        with contextlib.ExitStack() as lock:
            with contextlib.suppress(OSError):  # the memory is full, or a launcher removes the directory
                if self.usable:
                    lock.enter_context(self._locked("readers", fcntl.LOCK_SH))
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, how: int, *, create: bool = True) -> Iterator[bool]:
        flags = os.O_RDWR | os.O_CREAT * create | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self.root / name, flags, 0o600)
        try:
            try:
                fcntl.flock(handle, how)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile holds it too
            os.close(handle)

    def drop(self, there: Iterable[str]) -> None:
        """Remove these names from ``memory``, once no rank reads. For the writer only."""
        with contextlib.suppress(FileNotFoundError), self._locked("readers", fcntl.LOCK_EX):  # a launcher removed it
            for name in there:
                shutil.rmtree(self.memory / name, ignore_errors=True)
