"""Jobs of several ranks on one device: killed, stopped or broken, and resumed with the bits of an unbroken run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.e2e.harness import Job
from tests.gpu.conftest import ROOT

SCRIPT = Path(__file__).with_name("rank_job.py")
RANKS, STEPS = 4, 14
FAULTS = {
    "kill": [{"id": "k", "rank": 1, "step": 4, "phase": "backward", "action": "kill"}],
    "kill-rank-0": [{"id": "k", "rank": 0, "step": 4, "phase": "stepped", "action": "kill"}],
    "stop": [{"id": "s", "rank": 2, "step": 4, "phase": "loss", "action": "stop"}],
    "raise": [{"id": "r", "rank": 3, "step": 4, "phase": "data", "action": "raise"}],
    "assert": [{"id": "a", "rank": 1, "step": 4, "phase": "loss", "action": "assert"}],
    "hang": [{"id": "h", "rank": 2, "step": 4, "phase": "loss", "action": "hang"}],
    "controller": [
        {"id": "c", "rank": 0, "step": 3, "phase": "data", "action": "kill-controller"},
        {"id": "k", "rank": 1, "step": 9, "phase": "backward", "action": "kill"},
    ],
}
HANG_S = "4"


def job(directory: Path, device: str, kind: str, faults: list[dict[str, Any]], **settings: Any) -> Job:
    """Return a job. Without faults it is the unbroken one and runs without ttp."""
    env = {
        "JOB_DEVICE": device,
        "JOB_KIND": kind,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **settings.pop("env", {}),
    }
    protected = bool(faults)
    if protected:
        env["TTP_HANG_S"] = HANG_S
    return Job(
        directory, ranks=settings.pop("ranks", RANKS), steps=STEPS, script=SCRIPT, faults=faults, env=env,
        protected=protected, max_restarts=4 if protected else 0, **settings,
    )  # fmt: skip


def resumed_like_unbroken(directory: Path, device: str, kind: str, fault: str, **settings: Any) -> str:
    """Run both jobs. Returns why the resumed one does not end with the other's bits; empty: it does."""
    unbroken = _unbroken(directory / "unbroken", device, kind, settings)
    if isinstance(unbroken, str):
        return f"the unbroken job does not run:\n{unbroken}"
    broken = job(directory / "broken", device, kind, FAULTS[fault], **dict(settings))
    try:
        if broken.run():
            return f"the job was not resumed to its end:\n{broken.story()}"
        if len(broken.starts()) < 2 or broken.starts()[1] < 4:
            return f"it began at {broken.starts()}:\n{broken.story()}"
        if broken.results() != unbroken:
            return f"other bits: {broken.results()} instead of {unbroken}\n{broken.story()}"
        return ""
    finally:
        broken.stop()


def went_on_like_unbroken(
    directory: Path, device: str, kind: str, faults: list[dict[str, Any]], **settings: Any
) -> tuple[Job, str]:
    """Run the job with ``TTP_CONTINUITY=keep``. Returns it, and why it did not end like the unbroken one; or ""."""
    unbroken = _unbroken(directory / "unbroken", device, kind, settings)
    kept = settings | {
        "env": {"TTP_KEEP_CUDA": "1", **settings["env"]},
        "flags": ["--standalone", "--continuity", "keep"],
    }
    broken = job(directory / "broken", device, kind, faults, **kept)
    if isinstance(unbroken, str):
        return broken, f"the unbroken job does not run:\n{unbroken}"
    try:
        if broken.run():
            return broken, f"the job was not resumed to its end:\n{broken.story()}"
        if broken.starts() != [0, *broken.committed()] or len(broken.committed()) != len(faults):
            return broken, f"it began at {broken.starts()}, and saved {broken.committed()}:\n{broken.story()}"
        return broken, "" if broken.results() == unbroken else f"other bits:\n{broken.story()}"
    finally:
        broken.stop()


_known: dict[str, list[dict[str, Any]] | str] = {}


def _unbroken(directory: Path, device: str, kind: str, settings: dict[str, Any]) -> list[dict[str, Any]] | str:
    """Return the results of an unbroken run, each kind run once; or its log if it fails."""
    key = repr((device, kind, sorted(settings.items())))
    if key not in _known:
        running = job(directory, device, kind, [], **dict(settings))
        try:
            _known[key] = running.story() if running.run() else running.results()
        finally:
            running.stop()
    return _known[key]
