"""The example job, with workers that die where a test says. Run by the launcher.

``JOB_KILLS``: for each launch a list of ``[rank, step, place]``, as JSON; the places are those of ``Killer``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class NoTorch(MetaPathFinder):
    """Blocks the import of torch, which MindSpore's users may not have."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


sys.meta_path.insert(0, NoTorch())

from mindspore.train import Callback

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "mindspore_mnist"))

import train_mnist

from ttp import session
from ttp.adapters.mindspore import adapter, barrier


def replace(owner: type, name: str, function: Any) -> None:
    setattr(owner, name, function)


class Killer(Callback):
    """Kills this process: at the ``begin`` of the step, at the ``gate``, in the ``update``, or at the ``end``.

    Steps are counted from the first launch on. In the ``meeting`` before an update the process dies after it has told
    its
    arrival to one rank, when the ranks that can make the update with that message have made it.
    """

    def __init__(self, step: int, place: str) -> None:
        super().__init__()
        self._step, self._place, self._now = step, place, 0
        self._wrap("begin_update", "gate", "update")
        self._wrap("end_update", "updated", "told")
        if place == "meeting":
            self._in_meeting()

    def _in_meeting(self) -> None:
        real = barrier.UpdateBarrier._hears

        def hears(found: Any, source: Any, gate: Any) -> bool:
            while (self._now, self._place) == (self._step, "meeting"):
                if len(list(TRACES.glob(f"made-*-{self._step}"))) == AHEAD:
                    self._at("meeting")
                time.sleep(0.01)
            return real(found, source, gate)

        replace(barrier.UpdateBarrier, "_hears", hears)

    def _wrap(self, method: str, before: str, after: str) -> None:
        real = getattr(adapter.MindSporeAdapter, method)

        def wrapped(found: Any) -> None:
            self._at(before)
            real(found)
            self._at(after)

        replace(adapter.MindSporeAdapter, method, wrapped)

    def _at(self, place: str) -> None:
        if (self._now, self._place) == (self._step, place):
            wanted = Path(os.environ.get("JOB_KILL_WHEN", "/dev/null"))
            while wanted.name != "null" and not (wanted.exists() and '"ready"' in wanted.read_text()):
                time.sleep(0.01)
            print(f"killed at {time.monotonic():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_begin(self, run_context: Any) -> None:
        resumed = session.current().adapter
        self._now = resumed.position.step if isinstance(resumed, adapter.MindSporeAdapter) else 0

    def on_train_step_begin(self, run_context: Any) -> None:
        self._now += 1
        self._at("begin")

    def on_train_step_end(self, run_context: Any) -> None:
        self._at("end")


class Stamps(Callback):
    """Prints the time of each step."""

    def on_train_step_end(self, run_context: Any) -> None:
        print(f"stepped at {time.monotonic():.3f}", flush=True)


TRACES = Path(os.environ.get("JOB_DIR", "."))
AHEAD = 2
"""Of four ranks those that need no more than the first message of one that dies in the meeting."""


def leave_traces() -> None:
    """Leave a file for each update that this rank has made."""
    real = adapter.MindSporeAdapter.end_update

    def traced(found: Any) -> None:
        real(found)
        processor = session.current().processor
        assert processor is not None
        (TRACES / f"made-{processor.env.rank}-{processor.gate.version}").touch()

    replace(adapter.MindSporeAdapter, "end_update", traced)


def kills() -> list[Callback]:
    launches = json.loads(os.environ.get("JOB_KILLS", "[]"))
    launch = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if os.environ.get("MS_ROLE") == "MS_SCHED" or launch >= len(launches):
        return []
    if any(place == "meeting" for _, _, place in launches[launch]):
        leave_traces()
    me = int(os.environ["RANK_ID"])  # as msrun says it too
    return [Killer(step, place) for rank, step, place in launches[launch] if rank == me]


if __name__ == "__main__":
    train_mnist.main(callbacks=kills() + [Stamps()] * ("JOB_STAMPS" in os.environ))
