"""Observe a job for all open pages: one request to the controller at a time, and none while no page is open.

Two tasks read the status and the incident files, on different threads, so that the status is shown even if the storage
hangs. Polling takes at most a twentieth of the controller's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ttp.cli.connection import Client, Where, find
from ttp.cli.incident_reader import IncidentLog, id_of, incident_files, read_incident
from ttp.cli.incidents import describe
from ttp.errors import TtpError
from ttp.store.history import read_launches
from ttp.web.view import TEXT_MAX, Pace, tell, view
from ttp.wire.v1 import controller_pb2 as pb

T = TypeVar("T")

log = logging.getLogger("ttp.web")

LOOK_S = 0.4
SHARE = 20
"""The wait after a poll is at least this many times the duration of the poll."""
FILES_S = 30.0
"""Longest wait after a look at the files, in seconds: however slow the storage is, the list of incidents goes on."""
IDLE_S = 10.0
"""Seconds after the last request until polling stops."""
LATE_S = 3.0
"""A rank is late if it has not reached the version that another rank had this many seconds ago.

Heartbeats are a second apart.
"""
FILE_THREADS = 4
"""Threads that read files of the job. They are not those that ask the controller, because the storage may hang."""
FILES_WAIT_S = 1.0
"""Seconds that an answer waits for the files of the job, as the storage may hang: first incidents, a recorded end."""
LISTED_MAX = 100
"""Largest number of incidents in the list; the newest are listed."""

Answer = tuple[pb.GetStatusResponse, Where]
"""A status, and the place of the controller that sent it."""


class Asker:
    """Asks the controller for the status. After a failure it looks for a controller again, as another one may lead.

    Args:
        address: address of the controller; None to find it.
        port: port of the controller; None to find it.
        token: the job's token; None to find it.
    """

    def __init__(self, address: str | None, port: int | None, token: str | None) -> None:
        self._given = (address, port, token)
        self._client: Client | None = None

    def __call__(self) -> Answer:
        """Request the status.

        Raises:
            TtpError: no controller answers; the text says what to do.
        """
        client = self._client = self._client or Client(find(*self._given))
        try:
            now = client.status()
        except TtpError:
            client.close()
            self._client = None
            raise
        return now, client.where


class Incidents:
    """Reads the incident files of a job: a list of all, and the contents of the newest.

    Args:
        directory: a ``save_dir`` to read in addition to that of the job; None for none.
    """

    def __init__(self, directory: Path | None) -> None:
        self._given = directory
        self._known: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}
        self.places: tuple[Path, ...] = () if directory is None else (directory,)
        self.listed: list[dict[str, Any]] = []
        self.newest: IncidentLog | None = None

    def belong_to(self, save_dir: str, run_dir: Path | None) -> None:
        """Set the directories of the job's incidents.

        Args:
            save_dir: the job's ``save_dir``; empty if it is not known.
            run_dir: the job's run directory, where files are that the storage refused; None if there is none here.
        """
        there = [self._given, Path(save_dir) if save_dir else None, run_dir]
        self.places = tuple(dict.fromkeys(place for place in there if place is not None))

    def look(self) -> bool:
        """Read the files that have changed, and return whether any has."""
        found, changed = {}, False
        for path in self._files():
            with contextlib.suppress(OSError, TtpError):  # the file was removed meanwhile, or cannot be read
                stat = path.stat()
                stamp = (stat.st_size, stat.st_mtime_ns)
                known = self._known.get(path)
                if known is None or known[0] != stamp:
                    story, changed = read_incident(path), True
                    known = (stamp, {**describe(story), "good": tell(story).get("good"), "lines": len(story.lines)})
                    if self.newest is None or _age(story) >= _age(self.newest):
                        self.newest = story
                found[path] = known
        changed = changed or len(found) != len(self._known)
        self._known = found
        best: dict[str, dict[str, Any]] = {}
        for _, one in found.values():
            if one["id"] not in best or one["lines"] > best[one["id"]]["lines"]:
                best[one["id"]] = one
        self.listed = sorted(best.values(), key=lambda one: (one["opened_unix_s"], one["id"]), reverse=True)
        return changed

    def ended(self) -> str:
        """Return the recorded end of the last launch; empty if none is recorded, as for a launch that still runs."""
        for place in self.places:
            with contextlib.suppress(TtpError):
                if (launches := read_launches(place)) and (last := launches[-1]).code is not None:
                    return f"exit {last.code}: {last.text}"[:TEXT_MAX]
        return ""

    def _files(self) -> Iterator[Path]:
        for place in self.places:
            with contextlib.suppress(TtpError):
                yield from incident_files(place)[:LISTED_MAX]

    def read(self, name: str) -> IncidentLog | None:
        """Return the incident with the id ``name``, from the longest file if there are several; None if there is none.

        Raises:
            TtpError: a file of the incident cannot be read.
        """
        paths = [path for path in self._files() if id_of(path) == name]
        stories = [read_incident(path) for path in paths]
        return max(stories, key=lambda story: len(story.lines), default=None)


def _age(story: IncidentLog) -> tuple[float, str, int]:
    """Return a key that sorts by age; of two files of one incident the longer one is newer."""
    return story.opened_unix_s, story.id, len(story.lines)


class Progress:
    """Computes the ``Pace`` of a job from its successive statuses."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._still: tuple[int, int, float] = (0, -1, 0.0)

    def at(self, now: pb.GetStatusResponse, at_s: float) -> Pace:
        """Take the status at the time ``at_s`` (seconds of the monotonic clock), and return the pace."""
        newest = max((rank.version for rank in now.ranks), default=0)
        if self._still[:2] != (now.incarnation, newest):
            if self._still[0] != now.incarnation:
                self._seen.clear()
            self._still = (now.incarnation, newest, at_s)
        self._seen.append((at_s, newest))
        while len(self._seen) > 1 and self._seen[1][0] <= at_s - LATE_S:
            self._seen.popleft()
        then_s, passed = self._seen[0]
        return Pace(passed if then_s <= at_s - LATE_S else 0, at_s - self._still[2])


class Looks:
    """Polls the job and holds the latest view for all open pages. Use it on one event loop only.

    Args:
        ask: function that returns the status; None to show only incidents.
        incidents: the incident files.
    """

    def __init__(self, ask: Callable[[], Answer] | None, incidents: Incidents) -> None:
        self.incidents = incidents
        self.number = 0
        """Number of the latest view."""
        self.answers = 0
        """How often the job has been asked, whether it answered or not. Changed files alone make a view, too."""
        self.text = "{}"
        """The latest view as JSON; see ``ttp.web.view``."""
        self.status: pb.GetStatusResponse | None = None
        self.answer: Answer | None = None
        """The latest answer; None: the job did not answer when it was asked last."""
        self._ask = ask
        self._news = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._wanted_at = 0.0
        self._view: dict[str, Any] = {"error": "", "ended": "", "stage": "", "incident": None}
        self._said = ""
        self._progress = Progress()
        self._threads = ThreadPoolExecutor(FILE_THREADS, "ttp-web-files")
        self._ended: asyncio.Future[str] | None = None
        self._looking: asyncio.Future[None] | None = None

    async def read(self, job: Callable[[], T]) -> T:
        """Return the result of a function that reads files of the job. It takes as long as the storage hangs."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, job)

    def want(self) -> None:
        """Keep polling for the next ``IDLE_S`` seconds, because a page is open."""
        self._wanted_at = time.monotonic()
        self._wanted.set()

    async def newer(self, number: int, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for a view newer than ``number``, and return whether there is one."""
        await self._until(lambda: self.number > number, timeout_s)
        return self.number > number

    async def fresh(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until the job has been asked: the last answer may be hours old.

        Then, if no incident is known, wait up to ``FILES_WAIT_S`` for a look at the files.
        """
        answers = self.answers
        await self._until(lambda: self.answers > answers, timeout_s)
        if self._looking is None or (self._looking.done() and not self.incidents.listed):
            self._looking = asyncio.ensure_future(self._look_at_files())
        await asyncio.wait({self._looking}, timeout=FILES_WAIT_S)

    async def _until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        self.want()
        async with self._news:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait_for(holds), timeout_s)

    async def run(self) -> None:
        """Poll the job until cancelled."""
        kinds = (self._look_at_job, math.inf), (self._look_at_files, FILES_S)
        tasks = [asyncio.create_task(self._watch(look, longest_s)) for look, longest_s in kinds]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _watch(self, look: Callable[[], Any], longest_s: float) -> None:
        while True:
            if time.monotonic() - self._wanted_at > IDLE_S:
                self._wanted.clear()
            await self._wanted.wait()
            began = time.monotonic()
            try:
                await look()
            except Exception:
                log.exception("cannot update the state of the job")
            share_s = min(longest_s, SHARE * (time.monotonic() - began))
            await asyncio.sleep(1.0 if self._view["error"] else max(LOOK_S, share_s))

    async def _look_at_job(self) -> None:
        await self._ask_job()
        self.answers += 1
        await self._publish()

    async def _ask_job(self) -> None:
        if self._ask is None:
            return
        try:
            self.answer = now, where = await asyncio.to_thread(self._ask)
        except TtpError as problem:
            self.answer = None
            if str(problem) != self._said:
                log.warning("%s", problem)
            self._said = str(problem)
            self._view |= {"error": str(problem), "ended": await self._recorded_end()}
        else:
            self.status, self._said = now, ""
            self.incidents.belong_to(now.save_dir, where.run_dir)
            pace = self._progress.at(now, time.monotonic())
            self._view = {**view(now, self.incidents.newest, pace), "controller": str(where)}

    async def _recorded_end(self) -> str:
        """Return ``Incidents.ended``; empty if that takes longer than ``FILES_WAIT_S``, as the storage may hang."""
        if self._ended is None or self._ended.done():
            self._ended = asyncio.ensure_future(self.read(self.incidents.ended))
        await asyncio.wait({self._ended}, timeout=FILES_WAIT_S)
        return self._ended.result() if self._ended.done() else ""

    async def _look_at_files(self) -> None:
        if await self.read(self.incidents.look):
            if self.status is not None and not self._view["error"]:
                self._view |= {"incident": view(self.status, self.incidents.newest)["incident"]}
            await self._publish()

    async def _publish(self) -> None:
        whole = {**self._view, "asks": self._ask is not None, "incidents": self.incidents.listed[:LISTED_MAX]}
        text = json.dumps(whole, separators=(",", ":"), ensure_ascii=True)
        async with self._news:
            self.text = text
            self.number += 1
            self._news.notify_all()
