"""A rank of a ``kit`` job: run the program, die at the planned point, and write digests of the final values.

The points are found through torch's global hooks, so the program needs no changes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttp.testing import kit
from ttp.testing.digests import digest

if TYPE_CHECKING:
    from torch import Tensor, nn


class Killer:
    """Kills this process at the planned point.

    Args:
        fault: the planned ``Kill`` as a dict.
    """

    def __init__(self, fault: dict[str, Any]) -> None:
        from torch.nn.modules.module import register_module_forward_hook
        from torch.optim import adam, sgd
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._fault = fault
        self._depth = 0  # of nested steps: a container's step() calls those of its optimizers
        self._steps = 0
        register_module_forward_hook(self._forward)
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        for library, name in ((adam, "adam"), (sgd, "sgd")):
            for kind in ("single_tensor", "fused", "multi_tensor"):
                _halve(library, f"_{kind}_{name}", self)

    def due(self, phase: str) -> bool:
        """Return whether the kill is planned for this phase, now."""
        return bool(self._steps >= self._fault["after"] and self._fault["phase"] == phase)

    def at(self, phase: str) -> None:
        """Kill this process if the kill is planned for this phase, now."""
        if self.due(phase):
            os.kill(os.getpid(), signal.SIGKILL)

    def _forward(self, module: nn.Module, _args: Any, output: Any) -> None:
        import torch

        if any(True for _ in module.children()) or not (isinstance(output, torch.Tensor) and output.requires_grad):
            return  # only layers of the trained model count
        self.at("forward")
        if self.due("backward"):
            hook: Any = output.register_hook
            hook(lambda _gradient: self.at("backward"))

    def _before(self, *_: Any) -> None:
        self._depth += 1

    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            if self._steps == self._fault["after"]:
                self.at("stepped")
            self._steps += 1


def _halve(library: Any, name: str, killer: Killer) -> None:
    """Wrap a torch function that updates all parameters: if a kill is due in it, update half of them and die."""
    whole = getattr(library, name)

    def update(params: list[Tensor], *lists: Any, **settings: Any) -> None:
        if killer.due("in_step"):
            count, half = len(params), (len(params) + 1) // 2
            cut = [v[:half] if isinstance(v, list) and len(v) == count else v for v in lists]
            whole(params[:half], *cut, **settings)
            killer.at("in_step")
        whole(params, *lists, **settings)

    setattr(library, name, update)


def _program(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None and spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run the rank that the environment variables describe; see the module's docstring."""
    import numpy as np
    import torch
    import torch.distributed as dist

    place, rank, world = Path(os.environ["KIT_DIR"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    program = _program(os.environ["KIT_PROGRAM"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ.get("KIT_STORE"), rank=rank, world_size=world)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 * life + rank)  # so that no two lives begin with the same random numbers
    fault = next((f for f in json.loads(os.environ["KIT_KILLS"])[life : life + 1] if f["rank"] == rank), None)
    if fault is not None:
        kit.plan(Killer(fault).at)

    def report(step: int, value: Any) -> None:
        said = value if isinstance(value, str) else float(value).hex()
        with (place / f"reported{rank}.log").open("a") as log:  # a report that was written survives a SIGKILL
            log.write(f"{life} {step} {said}\n")

    ended: dict[str, Any] = program.main(int(os.environ["KIT_STEPS"]), place / "checkpoints", report)
    ended |= {"python's random stream": random.getstate(), "torch's random stream": torch.get_rng_state()}
    ended["numpy's random stream"] = np.random.get_state(legacy=False)
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        ended["the device's random stream"] = cuda.get_rng_state()
    states = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in ended.items()}
    result = {name: digest(state) for name, state in states.items()}
    (place / f"result{rank}.json").write_text(json.dumps(result, sort_keys=True))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
