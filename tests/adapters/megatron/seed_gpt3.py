"""The guide's patched GPT-3 program on today's megatron-core: same names, order of calls and places.

The guide edits Megatron's sources. Here these edits are made from outside: ``ReplicatedOptimizer`` instead of
``DistributedOptimizer``, the calls around the inner optimizer's step, the barrier before it, and ``train``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.adapters.megatron import shims
from tests.adapters.megatron.gpt import Shape, Training
from tests.waiting import until

Hurt = Callable[[str], None]


def gpt3(shape: dict[str, Any], steps: int, life: int = 0, fault: dict[str, Any] | None = None) -> None:
    """Train under the original's names until ``steps`` updates are made.

    Args:
        shape: see ``Shape``; the optimizer is the replicated one.
        steps: number of updates of the job.
        life: how often it was started before.
        fault: ``{"rank", "step", "at"}`` of a rank that kills itself.
    """
    importlib.import_module("ttp.compat.mindio")  # puts the package into place
    framework_ttp: Any = importlib.import_module("mindio_ttp.framework_ttp")
    megatron_ttp: Any = importlib.import_module("mindio_ttp.megatron_ttp")
    training, rank = _made(shape, life, megatron_ttp.ReplicatedOptimizer), int(os.environ["RANK"])
    (optimizer,) = training.optimizer.chained_optimizers
    update = 0

    def hurt(at: str) -> None:
        if fault is None or (fault["step"], fault["at"]) != (update, at):
            return
        here = Path(os.environ["JOB_DIR"]) / at
        here.with_suffix(f".{rank}").touch()
        if fault["rank"] == rank:
            if at == "begin":  # behind the barrier each rank makes the update before at its own time
                until(lambda: len(list(here.parent.glob("begin.*"))) == dist.get_world_size())
            os.kill(os.getpid(), signal.SIGKILL)

    _patch_step(framework_ttp, optimizer, hurt)
    if life:
        training.scheduler.step(increment=1)  # the program may have loaded another checkpoint before
    start = megatron_ttp.load_checkpoint(training.chunks, training.optimizer, training.scheduler)

    def train(model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
        nonlocal update
        _join_the_job(framework_ttp, megatron_ttp)
        training.before_update = dist.barrier
        training.args.iteration, training.args.consumed_train_samples = start, start * training.batch
        for update in range(start, steps):  # noqa: B007 - told to hurt()
            hurt("begin")
            training.step()
            hurt("stepped")
            framework_ttp.ttp_set_ckpt_args((training.args.iteration, model, optimizer, opt_param_scheduler))

    framework_ttp.ttp_to_persist(train)(training.chunks, training.optimizer, training.scheduler)
    _leave_result(training, life, start)
    dist.barrier()


def plain(shape: dict[str, Any], steps: int) -> None:
    """The same training with Megatron's own optimizer: every rank has the whole state."""
    training = _made(shape | {"bf16": True, "distributed": False, "replicated": False}, 0, None, True)
    for _ in range(steps):
        training.step()
    _leave_result(training, 9, 0)
    dist.barrier()


def _made(shape: dict[str, Any], life: int, replicated: Any, same_streams: bool = False) -> Training:
    import megatron.core.optimizer as megatron_optimizer

    directory = Path(os.environ["JOB_DIR"])
    collectives: Any = dist
    store = collectives.FileStore(str(directory / f"store.{life}.{replicated is None}"), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    shims.apply()
    module: Any = megatron_optimizer
    if replicated is not None:
        module.DistributedOptimizer = replicated
        shape = shape | {"distributed": False, "replicated": True, "bf16": True}
    training = Training(Shape(**shape), seed=123 + life)  # nothing may be right by chance
    if same_streams:
        torch.manual_seed(123 + life)
    return training


def _patch_step(framework_ttp: Any, optimizer: Any, hurt: Hurt) -> None:
    inner_step = optimizer.optimizer.step

    def step() -> None:
        hurt("barrier passed")
        framework_ttp.ttp_start_updating_os(-1)
        inner_step()
        hurt("updated")
        if hasattr(optimizer, "increase_step"):
            optimizer.increase_step()
        framework_ttp.ttp_end_updating_os(optimizer.current_step)
        hurt("reported")

    optimizer.optimizer.step = step


def _join_the_job(ttp: Any, mega: Any) -> None:
    """Join the job with the calls of the guide, line by line."""
    from megatron.core import parallel_state as mpu

    cur_rank = dist.get_rank()
    world_size = dist.get_world_size()
    master_ip = os.getenv("MASTER_ADDR")
    port = int(os.environ["TTP_PORT"])
    dp_ranks = dist.get_process_group_ranks(mpu.get_data_parallel_group())
    if cur_rank == 0:
        controller_ip = os.getenv("XDL_IP")
        assert ttp.ttp_init_controller(cur_rank, world_size, len(dp_ranks) // 2, False) == 0
        assert ttp.ttp_start_controller(controller_ip, port) == 0
    assert ttp.ttp_init_processor(cur_rank, dp_ranks, len(dp_ranks), world_size, len(dp_ranks) // 2, False) == 0
    assert ttp.ttp_start_processor(master_ip, port) == 0
    ttp.ttp_register_save_ckpt_handler(mega.ttp_save_checkpoint)
    ttp.ttp_register_rename_handler(mega.rename_save_result)


def _leave_result(training: Training, life: int, start: int) -> None:
    weights = hashlib.sha256()
    for chunk in training.chunks:
        for parameter in chunk.parameters():
            weights.update(parameter.detach().float().numpy().tobytes())
    result = {
        "start": start,
        "weights": weights.hexdigest(),
        "losses": training.losses,
        "samples": training.args.consumed_train_samples,
        "scheduler": training.scheduler.num_steps,
        "streams": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }
    path = Path(os.environ["JOB_DIR"]) / f"result.{life}.{os.environ['RANK']}.json"
    path.write_text(json.dumps(result))
