"""Processes that meet again and again in shared memory, as fast as they can, until one of them is killed.

python meeting_ranks.py DIRECTORY RANK COUNT      prints "ready", and when it ends JSON: why, after how many meetings
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.processor.sentinel_owner import without_settings
from tests.waiting import until
from ttp.processor.gate import meeting as meeting_module
from ttp.processor.gate.meeting import BrokenError, Meeting, run
from ttp.processor.gate.meeting_place import find_place
from ttp.processor.liveness.futex import Mapping
from ttp.processor.liveness.peer_watcher import PeerWatcher
from ttp.processor.liveness.sentinel import Sentinel

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]


def through_files(directory: Path, rank: int, count: int) -> Any:
    """Exchange values as the process group of a job does, through files."""
    rounds = iter(range(100))

    def gather(data: bytes) -> list[bytes]:
        number = next(rounds)
        draft = directory / f"draft.{rank}"
        draft.write_bytes(data)
        draft.rename(directory / f"told.{number}.{rank}")
        everyone = [directory / f"told.{number}.{other}" for other in range(count)]
        until(lambda: all(path.exists() for path in everyone), PATIENCE_S, every_s=0.002)
        return [path.read_bytes() for path in everyone]

    return gather


def main(directory: Path, rank: int, count: int) -> None:
    meeting_module.NET_S = 3600.0  # whoever is not woken sleeps until the test gives up
    pages, known = directory / "pages", threading.Event()
    sentinel = Sentinel(pages, rank, f"{rank}", 0)
    place = find_place(rank, pages, through_files(directory, rank, count))
    assert place.ranks == tuple(range(count)) and place.firsts == (0,), place
    meeting = Meeting(place.words, place.number, count, wide=False, gone=place.gone)

    def died(*_: object) -> None:
        known.set()
        run(meeting.warn())

    PeerWatcher(pages, rank, 0, died).start()
    with (directory / "held").open("r+b") as file:
        held = Mapping(file.fileno(), 4096, writable=True)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    turn = early = 0

    async def stay() -> bool:
        return False

    try:
        while True:
            turn += 1
            held.set_word(64 * rank, turn)  # the gradient
            if not run(meeting.come(turn)):
                run(meeting.wait(turn, stay))
            early += min(held.word(64 * other) for other in range(count)) < turn
    except BrokenError as problem:
        sys.stdout.write(json.dumps({"turn": turn, "early": early, "why": str(problem)}) + "\n")
    sys.stdout.flush()
    known.wait(PATIENCE_S)  # a neighbour watches whoever is left
    sentinel.close()


class Ranks:
    """The processes of this module, as a test uses them."""

    def __init__(self, directory: Path, count: int) -> None:
        directory.mkdir()
        (directory / "pages").mkdir(mode=0o700)
        (directory / "held").write_bytes(bytes(4096))
        command = [sys.executable, "-m", "tests.processor.meeting_ranks", str(directory)]
        self.directory = directory
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(count)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=without_settings()
            )
            for rank in range(count)
        ]

    def __enter__(self) -> Ranks:
        for process in self.processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def told(self, rank: int) -> Any:
        """Return the last output of a rank."""
        output, _ = self.processes[rank].communicate(timeout=PATIENCE_S)
        return json.loads(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
