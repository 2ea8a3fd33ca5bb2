"""Runs ``seed_power_off.py`` unchanged, and adds random numbers, kills and a journal from outside."""

from __future__ import annotations

import hashlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "mindspore_mnist"))

import mindspore as ms
import mindspore.dataset as ds
import mnist_files
from mnist_job import Killer, kills  # type: ignore[import-not-found] # beside this file; hides torch first

from ttp.adapters.mindspore.callbacks import Protection

SEED, IMAGES = 1, 96


def watched(killers: list[Killer]) -> None:
    """Make the program's own callback, which runs in every step, call the killers and print the result of each step."""
    begin, end = Protection.on_train_step_begin, Protection.on_train_step_end

    def on_begin(self: Protection, run_context: Any) -> None:
        begin(self, run_context)
        position = self._adapter.position if self._adapter is not None else None
        if position is not None and not self.__dict__.setdefault("told_begin", False):
            self.__dict__["told_begin"] = True
            print(f"rank {os.environ['RANK_ID']} begins after step {position.step - 1}.", flush=True)
            for killer in killers:
                killer._now = position.step - 1
        for killer in killers:
            killer.on_train_step_begin(run_context)

    def on_end(self: Protection, run_context: Any) -> None:
        found = run_context.original_args()
        position = self._adapter.position if self._adapter is not None else None
        end(self, run_context)
        loss = float(found.net_outputs.asnumpy()).hex()
        # not the optimizer's own: the program loads the network only, as its documentation has it
        state = hashlib.sha256(b"".join(p.asnumpy().tobytes() for p in found.network.get_parameters())).hexdigest()
        if position is not None:
            where = f"step {position.step} epoch {found.cur_epoch_num}"
            print(f"rank {os.environ['RANK_ID']} {where} {loss} {state[:16]}", flush=True)

    # the program makes its Protection itself, so that it is watched through the class
    Protection.on_train_step_begin, Protection.on_train_step_end = on_begin, on_end  # type: ignore[method-assign]


if __name__ == "__main__":
    ms.set_seed(SEED)
    ds.config.set_seed(SEED)
    if "JOB_WAITS" in os.environ:
        ms.set_context(pynative_synchronize=True)
    os.environ["DATA_PATH"] = str(mnist_files.write(Path("MNIST_Data/train"), IMAGES))
    watched(kills())
    sys.argv[0] = str(Path(__file__).with_name("seed_power_off.py"))
    runpy.run_path(sys.argv[0], run_name="__main__")
