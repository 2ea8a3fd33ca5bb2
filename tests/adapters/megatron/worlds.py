"""What the ranks of a test world do; run by ``nursery.py``."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import shims
import torch
import torch.distributed as dist
from gpt import Shape, Training

import ttp


def _directory() -> Path:
    return Path(os.environ["JOB_DIR"])


def _rank() -> int:
    return int(os.environ["RANK"])


def _join(name: str) -> None:
    store = dist.FileStore(str(_directory() / f"store.{name}"), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo", store=store, rank=_rank(), world_size=int(os.environ["WORLD_SIZE"]))
    shims.apply()


def job(shape: dict[str, Any], steps: int, life: int = 0, fault: dict[str, Any] | None = None, undo: str | None = None):  # type: ignore[no-untyped-def]
    """Train under ttp; ``fault`` says which ranks kill themselves, at which step and where in it."""
    _join(f"job{life}")
    _train(Shape(**shape), steps, life, fault or {}, undo)
    dist.barrier()


@ttp.ttp_to_persist
def _train(shape: Shape, steps: int, life: int, fault: dict[str, Any], undo: str | None) -> None:
    from ttp.adapters.megatron import protect

    training = Training(shape)
    hurt = _hurt(training, fault)
    protect(
        training.chunks, training.optimizer, training.scheduler, training.args,
        save_dir=_directory() / "checkpoints", undo=undo,
    )  # fmt: skip
    start = ttp.restore()
    _note(f"{life} start {start}")
    assert training.args.iteration == start, (training.args, start)
    for step in range(start, steps):
        hurt["step"] = step
        hurt["at"]("begin")
        training.step()
        hurt["at"]("stepped")
        _note(f"{life} version {step + 1}")
    (_directory() / f"result{_rank()}.json").write_text(json.dumps(summary(training), sort_keys=True))


def _note(text: str) -> None:
    with (_directory() / f"rank{_rank()}.log").open("a") as log:
        log.write(text + "\n")


def _hurt(training: Training, fault: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"step": -1}

    def at(phase: str) -> None:
        if fault and _rank() in fault["ranks"] and (state["step"], phase) == (fault["step"], fault["phase"]):
            os.kill(os.getpid(), signal.SIGKILL)

    state["at"] = at
    for number, inner in enumerate(training.optimizer.chained_optimizers):
        if inner.optimizer is not None:
            inner.optimizer.register_step_pre_hook(lambda *_args, n=number: at(f"pre_step{n}"))
            inner.optimizer.register_step_post_hook(lambda *_args, n=number: at(f"post_step{n}"))
    training.before_update = lambda: at("reduced")  # type: ignore[method-assign]
    return state


def digest(*parts: Any) -> str:
    """Of the values of these tensors."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part.detach().float().contiguous().numpy().tobytes() if isinstance(part, torch.Tensor) else part)
    return h.hexdigest()


def summary(training: Training) -> dict[str, str]:
    """All that a resumed rank has to have in common with one that never stopped."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    inner = [each.optimizer for each in training.optimizer.chained_optimizers if each.optimizer is not None]
    main = [p for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
    groups = [{k: v for k, v in g.items() if k != "params"} for o in inner for g in o.param_groups]
    scalers = [
        s.state_dict() for each in training.optimizer.chained_optimizers if (s := getattr(each, "grad_scaler", 0))
    ]
    return {
        "weights": digest(*(p for chunk in training.chunks for p in chunk.parameters())),
        "main": digest(*main),
        "moments": digest(*(v for s in states for _, v in sorted(s.items()) if isinstance(v, torch.Tensor))),
        "groups": repr([sorted(group.items()) for group in groups]),
        "scalers": repr(scalers),
        "rng": digest(torch.get_rng_state(), *(s for _, s in sorted(get_cuda_rng_tracker().get_states().items()))),
        "args": repr(training.args),
        "last_losses": repr(training.losses[-2:]),
        "schedule": repr(training.scheduler.state_dict()),
    }
