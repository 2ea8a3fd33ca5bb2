"""Run scripts, several at a time, each in its own folder, and compare each with an unbroken run."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttp.chaos import launching, notes
from ttp.chaos.driver import Driver, Judged, Reference
from ttp.chaos.place import Places
from ttp.chaos.result import FILE, Result, result_of, write
from ttp.chaos.script import Script, to_toml
from ttp.errors import ConfigError

REFERENCE_S_MAX = 300.0
SCRIPT_FILE = "chaos.toml"


@dataclass(slots=True)
class Runner:
    """Runs scripts.

    Args:
        folder: folder for all files.
        tell: is called with every result, on the thread of its job.
        keep: whether to keep the checkpoints of jobs without findings too.
    """

    folder: Path
    tell: Callable[[Result], None]
    keep: bool = False
    _references: dict[tuple[int, int], Reference] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reference_lock: threading.Lock = field(default_factory=threading.Lock)
    _places: Places = field(default_factory=Places)

    def run(self, scripts: Sequence[Script], jobs: int, first: int = 0) -> None:
        """Run all scripts, ``jobs`` at a time, and return when the last one is over.

        Args:
            scripts: the scripts.
            jobs: number of jobs that run at the same time.
            first: number of the first job, for the names of folders.
        """
        pool = ThreadPoolExecutor(jobs, thread_name_prefix="chaos")
        try:
            steps = {kind: max(s.steps for s in scripts if _kind(s) == kind) for kind in map(_kind, scripts)}
            work = [
                pool.submit(self._job, first + index, script, steps[_kind(script)])
                for index, script in enumerate(scripts)
            ]
            for done in work:
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _job(self, index: int, script: Script, reference_steps: int) -> None:
        """Run one script. If its job has to be aborted, a new job does the remaining runs."""
        reference = self._reference(replace(script, steps=reference_steps))
        attempt = 0
        while script.runs:
            folder = self.folder / f"job-{index:03d}{f'-{attempt}' if attempt else ''}"
            done = self._attempt(index, script, folder, reference)
            script = script.only(script.runs[done:])
            attempt += 1

    def _attempt(self, index: int, script: Script, folder: Path, reference: Reference) -> int:
        """Run a script until its job ends, and return the number of judged runs, at least one."""
        folder.mkdir(parents=True)
        (folder / SCRIPT_FILE).write_text(to_toml(script))
        results: list[Result] = []

        def tell(judged: Judged) -> None:
            if results:
                self._tell(results[-1])
            results.append(result_of(index, script, folder, judged))  # the last result is told after the job's end

        with self._places.place(script, folder) as place:
            driver = Driver(script, folder, place, reference, tell)
            driver.run()
            bad = bool(driver.closing) or not all(result.good for result in results)
            if bad and place.disk is not None:
                shutil.copytree(place.disk.path, folder / "disk-copy")
        self._tell(replace(results[-1], findings=(*results[-1].findings, *driver.closing)))
        if not (bad or self.keep):
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return len(results)

    def _tell(self, result: Result) -> None:
        with self._lock:
            write(self.folder / FILE, result)
            self.tell(result)

    # -------------------------------------------------------------------------------------------------------- reference

    def _reference(self, script: Script) -> Reference:
        """Return the digests of an unbroken run of the same training; each kind of training is run once."""
        with self._reference_lock:
            if _kind(script) not in self._references:
                self._references[_kind(script)] = self._unbroken(script)
            return self._references[_kind(script)]

    def _unbroken(self, script: Script) -> Reference:
        folder = self.folder / f"unbroken-{script.world_size}-{script.width}"
        folder.mkdir(parents=True, exist_ok=True)
        command, env = launching.unbroken(script, folder)
        log = folder / "launcher.log"
        with log.open("wb") as out:
            told = {"stdout": out, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            done = subprocess.run(command, env=env, timeout=REFERENCE_S_MAX, check=False, **told)  # type: ignore[call-overload]
        if done.returncode:
            raise ConfigError(f"the training fails although no fault was injected; see {log}")
        return notes.reference(notes.read(folder, script.world_size))


def _kind(script: Script) -> tuple[int, int]:
    """Return the key of a job's training: equal keys mean equal bits in equal steps, for any number of steps."""
    return script.world_size, script.width
