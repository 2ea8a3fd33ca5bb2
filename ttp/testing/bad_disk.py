"""A disk that fails when it is told to: real system calls, through the kernel, into a directory.

```python
with BadDisk(mountpoint, directory) as disk:
    disk.rules(Rule(("WRITE",), name=r"\\.distcp$", skip=3, error=errno.ENOSPC))
```

Needs ``/dev/fuse`` and the right to mount (root, or a container with CAP_SYS_ADMIN); ``why_not`` says what is missing.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

from ttp.testing import fuse_wire as wire
from ttp.testing.fuse_server import Rule

__all__ = ["BadDisk", "Rule", "why_not"]


class BadDisk:
    """Mounted while the context is open. Whatever happens to this process, the mount goes with it.

    Args:
        mountpoint: made if it is not there.
        directory: holds the bytes; the same.
        journal: write down every change, see ``ttp.testing.crash``.

    Raises:
        OSError: it cannot be mounted.
    """

    def __init__(self, mountpoint: Path, directory: Path, *, journal: bool = False) -> None:
        self.mountpoint, self.directory = mountpoint, directory
        for made in (mountpoint, directory):
            made.mkdir(parents=True, exist_ok=True)
        options = ["--journal"] if journal else []
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "ttp.testing.fuse_server", str(mountpoint), str(directory), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # ^C is for the test
        )
        try:
            self._reply()
            self._teach()
        except BaseException:
            self.close()
            raise

    def _teach(self) -> None:
        """The kernel closes a file and learns that FLUSH is not answered; see ``fuse_wire.OPCODES``."""
        probe = self.mountpoint / ".bad-disk"
        probe.touch()
        probe.unlink()
        self._ask("begin")

    def rules(self, *rules: Rule) -> None:
        """From now on these apply, the first that fits; without any all goes well."""
        self._ask("rules", [asdict(rule) for rule in rules])

    def hits(self) -> list[int]:
        """How often each rule has struck."""
        return list(self._ask("hits"))

    def wait_hit(self, timeout_s: float = 60.0) -> None:
        """Return as soon as a rule has struck.

        Raises:
            TimeoutError: none has.
        """
        deadline = time.monotonic() + timeout_s
        while not any(self.hits()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing has met a rule of the bad disk within {timeout_s:g} s")
            time.sleep(0.01)

    def thaw(self) -> None:
        """A mount that hangs goes on."""
        self._ask("thaw")

    def mark(self, text: str) -> None:
        """Put a line of one's own into the journal."""
        self._ask("mark", text)

    def journal(self) -> list[list[Any]]:
        """Every change so far, in order."""
        with tempfile.NamedTemporaryFile() as file:
            self._ask("journal", file.name)
            read: list[list[Any]] = msgpack.unpackb(Path(file.name).read_bytes())
        return read

    def die(self) -> None:
        """The server is gone, the mount is not: whoever looks is told ENOTCONN."""
        self._ask("die", None)
        self._server.wait()

    def vanish(self) -> None:
        """As ``umount -l``: the path is that of an empty directory below; what was open meets ENOTCONN."""
        self.close()

    def close(self) -> None:
        """Take the mount away, whoever still waits for it."""
        with contextlib.suppress(OSError):
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()
        wire.unmount(self.mountpoint)  # it has done so itself, unless it died

    def __enter__(self) -> BadDisk:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, verb: str, argument: Any = None) -> Any:
        with self._lock:
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps({verb: argument}) + "\n")
            self._server.stdin.flush()
            return self._reply()

    def _reply(self) -> Any:
        assert self._server.stdout is not None
        answer = json.loads(self._server.stdout.readline() or '{"problem": "the server of the bad disk has ended"}')
        if "problem" in answer:
            raise OSError(answer["problem"])
        return answer["done"]


def why_not() -> str:
    """Why there can be no ``BadDisk`` here; empty when there can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with BadDisk(Path(folder, "mount"), Path(folder, "directory")):
                return ""
        except OSError as problem:
            return f"no FUSE file system can be mounted here: {problem}"
