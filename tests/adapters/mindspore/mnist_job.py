"""The example, with a worker that dies where a test wants it. Run by the launcher.

``JOB_KILLS``: JSON list of ``[rank, step, place]``; places are those of ``Killer``. Only the first launch is hurt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class NoTorch(MetaPathFinder):
    """Who trains with MindSpore has no torch."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


sys.meta_path.insert(0, NoTorch())

from mindspore.train import Callback  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "mindspore_mnist"))

import train_mnist  # noqa: E402

from ttp.adapters.mindspore import adapter  # noqa: E402


class Killer(Callback):
    """Ends this process without a word: ``begin`` of the step, at the ``gate``, in the ``update``, at the ``end``."""

    def __init__(self, step: int, place: str) -> None:
        super().__init__()
        self._step, self._place, self._now = step, place, 0
        self._wrap("begin_update", "gate", "update")
        self._wrap("end_update", "updated", "told")

    def _wrap(self, method: str, before: str, after: str) -> None:
        real = getattr(adapter.MindSporeAdapter, method)

        def wrapped(found: Any) -> None:
            self._at(before)
            real(found)
            self._at(after)

        setattr(adapter.MindSporeAdapter, method, wrapped)

    def _at(self, place: str) -> None:
        if (self._now, self._place) == (self._step, place):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_step_begin(self, run_context: Any) -> None:
        self._now += 1
        self._at("begin")

    def on_train_step_end(self, run_context: Any) -> None:
        self._at("end")


def kills() -> list[Callback]:
    if os.environ.get("MS_ROLE") == "MS_SCHED" or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        return []
    mine = [k for k in json.loads(os.environ.get("JOB_KILLS", "[]")) if k[0] == int(os.environ["RANK"])]
    return [Killer(step, place) for _, step, place in mine]


if __name__ == "__main__":
    train_mnist.main(callbacks=kills())
