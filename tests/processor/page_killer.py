"""Kills a process that writes pages, again and again, and reads the pages that are left. Run on its own: it forks.

python page_killer.py DIRECTORY SEED KILLS      prints one JSON object
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

from ttp.processor.local_state.pages import Kept, Page, PageWriter, read_page

RANK, INCARNATION = 3, 9
WORD = struct.Struct("<QQ")  # version and turn (0, 1: provisional, 2: final) of the last write that returned


def content(version: int, turn: int) -> tuple[list[bytes], list[Kept]]:
    """Return the content of a write. Every byte depends on the write, except for a kept part that changes rarely."""
    seed = WORD.pack(version, turn)
    small = [seed * (1 + version % 300), b"", seed * 200]
    kept: list[Kept] = [((0, version // 5), WORD.pack(version // 5, 0) * 3000), ((1, 0), b"constant" * 1000)]
    return small, kept


def joined(version: int, turn: int) -> bytes:
    small, kept = content(version, turn)
    return b"".join([*small, *(bytes(data) for _, data in kept)])


def write_for_ever(directory: Path, progress: mmap.mmap) -> None:
    writer = PageWriter(directory, RANK, capacity=256, incarnation=INCARNATION)
    version = 0
    while not writer.problem:
        version += 1
        for turn in range(3):
            small, kept = content(version, turn)
            writer.write(version, turn == 2, small, kept)
            progress[:16] = WORD.pack(version, turn)


def judge(directory: Path, version: int, turn: int) -> str:
    """Return what is wrong with the pages after a kill; empty: nothing."""
    page = read_page(directory, RANK, version, INCARNATION)
    if not isinstance(page, Page):
        return f"version {version}, turn {turn} had been written, but {page}"
    allowed = [joined(version, t) for t in range(turn, 3)]  # the write under way may have been done too
    if page.data not in allowed or page.version != version or page.final != (page.data == allowed[-1]):
        return f"version {version}, turn {turn} holds other bytes"
    before = read_page(directory, RANK, version - 1, INCARNATION)
    if version > 1 and (not isinstance(before, Page) or before.data != joined(version - 1, 2) or not before.final):
        return f"version {version - 1} is gone: {before!r:.200}"
    after = read_page(directory, RANK, version + 1, INCARNATION)
    if isinstance(after, Page) and after.data != joined(version + 1, 0):
        return f"version {version + 1} holds other bytes"
    return ""


def kill_once(directory: Path, after: int) -> tuple[int, bool, str]:
    """Kill a writer once it has written version ``after``. In a fixed time a busy machine may let it write none."""
    progress = mmap.mmap(-1, 16)
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(directory, progress)
        finally:
            os._exit(1)
    while WORD.unpack(progress[:16])[0] < after:
        time.sleep(0.0001)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        return 0, False, "the writer ended by itself"
    version, turn = WORD.unpack(progress[:16])
    torn = "torn" in str(read_page(directory, RANK, 0, INCARNATION))
    return version, torn, judge(directory, version, turn)


def main(directory: Path, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    results = [kill_once(directory, chance.randint(1, 200)) for _ in range(kills)]
    summary = {
        "versions": [version for version, _, _ in results],
        "torn": sum(torn for _, torn, _ in results),
        "problems": [problem for _, _, problem in results if problem],
    }
    sys.stdout.write(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
