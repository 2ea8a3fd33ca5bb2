"""Runs one of the programs of this folder, kills it from outside, and writes down what it ends with.

The programs know nothing of this: the points at which a rank dies are found through torch's global hooks. Environment:
``JOB_DIR``, ``JOB_STEPS``, ``JOB_PROGRAM`` (a module of this folder) and ``JOB_FAULTS``, a JSON list with one fault for
each life of the job: ``{"rank", "after", "phase"}``. In that life ``rank`` kills itself in the next ``phase`` after
``after`` steps of optimizers:

======== ==========================================================
forward  inside of the model, behind its first layer
backward when the gradient comes back to that layer
in_step  half of the parameters are updated
stepped  ``step()`` is about to return; schedulers, averages and whatever else a loop does then come after it
======== ==========================================================
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import adam, sgd
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.programs.digests import digest

JOB_DIR = Path(os.environ["JOB_DIR"])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Killer:
    """Ends this process at the planned point."""

    def __init__(self, faults: list[dict[str, Any]]) -> None:
        self._fault = next((f for f in faults[LIFE : LIFE + 1] if f["rank"] == RANK), None)
        self._depth = 0  # of steps: a container's step() makes those of its optimizers
        self._steps = 0
        if self._fault is not None:
            register_module_forward_hook(self._forward)
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)
            halve(adam, "_single_tensor_adam", self)
            halve(sgd, "_single_tensor_sgd", self)

    def due(self, phase: str) -> bool:
        assert self._fault is not None
        return bool(self._steps >= self._fault["after"] and self._fault["phase"] == phase)

    def at(self, phase: str) -> None:
        if self.due(phase):
            os.kill(os.getpid(), signal.SIGKILL)

    def _forward(self, module: nn.Module, _args: Any, output: Any) -> None:
        if any(True for _ in module.children()) or not (isinstance(output, Tensor) and output.requires_grad):
            return  # only a layer of the model that is trained
        self.at("forward")
        if self.due("backward"):
            hook: Any = output.register_hook
            hook(lambda _gradient: self.at("backward"))

    def _before(self, *_: Any) -> None:
        self._depth += 1

    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._steps += 1
            if self._fault is not None and self._steps == self._fault["after"] + 1:
                self._steps -= 1
                self.at("stepped")
                self._steps += 1


def halve(library: Any, name: str, killer: Killer) -> None:
    """Let torch's own update of all parameters stop half-way, where a kill is due in it."""
    whole = getattr(library, name)

    def update(params: list[Tensor], *lists: Any, **settings: Any) -> None:
        if killer.due("in_step"):
            count, half = len(params), (len(params) + 1) // 2
            cut = [v[:half] if isinstance(v, list) and len(v) == count else v for v in lists]
            whole(params[:half], *cut, **settings)
            killer.at("in_step")
        whole(params, *lists, **settings)

    setattr(library, name, update)


# ------------------------------------------------------------------------------------------------- what it ends with


def report(step: int, loss: Any) -> None:
    """The programs' log of losses: one write each, which outlives a SIGKILL."""
    with (JOB_DIR / f"losses{RANK}.log").open("a") as log:
        log.write(f"{step} {float(loss).hex()}\n")


def main() -> None:
    program = importlib.import_module(f"tests.programs.{os.environ['JOB_PROGRAM']}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ.get("JOB_STORE"), rank=RANK, world_size=WORLD)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 * LIFE + RANK)  # no life begins with the numbers of another
    Killer(json.loads(os.environ.get("JOB_FAULTS", "[]")))
    ended: dict[str, Any] = program.main(int(os.environ["JOB_STEPS"]), JOB_DIR / "checkpoints", report)
    result = {name: digest(value.state_dict()) for name, value in ended.items()}
    result |= {
        "torch's random stream": digest(torch.get_rng_state()),
        "python's random stream": digest(random.getstate()),
        "numpy's random stream": digest(np.random.get_state(legacy=False)),
    }
    (JOB_DIR / f"result{RANK}.json").write_text(json.dumps(result, sort_keys=True))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
