"""A process that holds a sentinel and obeys commands on standard input.

python sentinel_owner.py DIRECTORY RANK INCARNATION LOOK_S      looks for other ranks every LOOK_S; 0: does not watch
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

from ttp.processor.liveness.futex import WAITERS
from ttp.processor.liveness.peer_watcher import PeerWatcher
from ttp.processor.liveness.sentinel import FILE_BYTES, WORDS, Sentinel, pack_header, sentinel_name, word_at

PATIENCE_S = 30.0


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def fork(sentinel: Sentinel, closes: bool) -> None:
    child = os.fork()
    if child == 0:
        if closes:
            sentinel.close()
            os._exit(0)
        signal.pause()
    if closes:
        os.waitpid(child, 0)
    say(child)


def main(directory: Path, rank: int, incarnation: int, look_s: float) -> None:
    sentinel = Sentinel(directory, rank, f"nonce-{rank}-{os.getpid()}", incarnation)
    ring = PeerWatcher(directory, rank, incarnation, lambda r, nonce, _: say("died", r, nonce), look_s)
    if look_s:
        ring.start()
    say("placed" if sentinel.wait_placed(PATIENCE_S) else "not placed")
    for line in sys.stdin:
        match line.strip():
            case "leave":
                sentinel.close()
                say("left")
            case "come again":
                sentinel = Sentinel(directory, rank, f"another-{rank}-{os.getpid()}", incarnation)
                say("placed" if sentinel.wait_placed(PATIENCE_S) else "not placed")
            case "fork":
                fork(sentinel, closes=False)
            case "fork and close":
                fork(sentinel, closes=True)
            case "spawn":
                subprocess.run(["true"], check=True)
                say("spawned")
            case "whom":
                say(ring.watched)
            case "hold the interpreter lock":
                say("holding it")
                ctypes.PyDLL(None).sleep(60)
            case "exec":
                os.execvp("sleep", ["sleep", "60"])
            case "raise":
                raise SystemExit(1)
            case "exit":
                os._exit(0)


class Owner:
    """The process of this module, as a test uses it."""

    def __init__(self, directory: Path, rank: int, incarnation: int = 7, look_s: float = 0) -> None:
        command = [sys.executable, __file__, str(directory), str(rank), str(incarnation), str(look_s)]
        self.rank = rank
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=without_settings()
        )
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self.hear() == "placed"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def nonce(self) -> str:
        return f"nonce-{self.rank}-{self.pid}"

    def hear(self) -> str:
        return self._said.get(timeout=PATIENCE_S)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.strip())

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()

    def ask(self, what: str) -> str:
        self.tell(what)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self._listener.join(PATIENCE_S)
        self.process.communicate()


def forged(rank: int, pid: int = 1234, start: int = 5, word: int = WAITERS | 1234) -> bytes:
    """Return the content of the sentinel of a process that there never was."""
    content = bytearray(pack_header(rank, pid, start, 7, f"forged-{rank}").ljust(FILE_BYTES, b"\0"))
    for number in range(WORDS):
        content[word_at(number) : word_at(number) + 4] = word.to_bytes(4, "little")
    return bytes(content)


def put(directory: Path, rank: int, content: bytes, mode: int = 0o600) -> None:
    """Write the file of a sentinel."""
    path = directory / sentinel_name(rank)
    path.write_bytes(content)
    path.chmod(mode)


def without_settings() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("TTP_")}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
