"""Runs MindSpeed-LLM's own, unchanged ``high_availability`` modules against ttp: four processes on CPU. Run it by hand.

``python -m tests.compat.mindspeed_llm CHECKOUT {kill,uce}``, with ``CHECKOUT`` a clone of Ascend/MindSpeed-LLM (commit
c77308a1 was used). The modules need an accelerator, Megatron and MindSpeed, which are replaced by stand-ins:
``torch_npu``, ``torch.npu``, all of ``megatron`` and ``mindspeed``, the optimizer, and the transfer and the roll-back
of a repair. All other code that speaks to ``mindio_ttp`` is theirs. ``kill`` ends rank 1 in step 3; with ``uce`` it
loses memory.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from ttp.compat.mindio.placing import put_into_place

WORLD, STEPS, HURT_AT, VICTIM = 4, 6, 3, 1
PATIENCE_S = 120.0
_dist: Any = dist
PRETENDED = ("torch_npu", "megatron", "mindspeed", "mindspeed_llm.tasks", "mindspeed_llm.training")
HOME = "mindspeed_llm.core.high_availability"


# -------------------------------------------------------------------------------------------------------- the stand-ins


class StandIn(ModuleType):
    """A module that has every name; all of its functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return getattr(self, name)


class Pretender(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for modules that are not installed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(name + ".") for name in PRETENDED):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Npu:
    """``torch.npu``: one device, whose collectives end when it is stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.said: list[str] = []
        self.Stream = self.SyncLaunchStream = lambda: SimpleNamespace(wait_event=lambda event: None)
        self.Event = lambda **_: SimpleNamespace(record=lambda: None, recorded_time=lambda: time.time_ns() // 1000)

    def stop_device(self, device: int) -> None:
        self.said.append("stop_device")
        self.stopped.set()

    def restart_device(self, device: int) -> None:
        self.said.append("restart_device")
        self.stopped.clear()

    def check_uce_in_memory(self, device: int) -> int:
        return 3  # memory of the state

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def current_device(self) -> int:
        return 0

    def set_device(self, device: int) -> None:
        self.said.append(f"set_device {device}")

    def empty_cache(self) -> None:
        pass

    @contextmanager
    def stream(self, stream: Any) -> Any:
        yield


class Optimizer:
    """Holds one number, replicated like theirs: ranks 0 and 2 have one half of it, 1 and 3 the other."""

    def __init__(self, rank: int) -> None:
        self.config = SimpleNamespace(reuse_fp32_param=False)
        self.data_parallel_group = dist.group.WORLD
        self.rank, self.value = rank, 1.0
        self.save_args: dict[str, Any] = {}
        self.whole: list[float] = []

    def set_dump_args(self, save_rank: int, step: int, rank_list: Sequence[int]) -> None:
        self.save_args = {"rank": save_rank, "step": step, "rank_list": list(rank_list)}

    def sync_gather_all_model_params(self, force_sync: bool) -> None:
        group: Any = importlib.import_module(f"{HOME}.tft_replica_group")
        found = [torch.zeros(1, dtype=torch.float64) for _ in self.save_args["rank_list"]]
        mine = torch.tensor([self.value], dtype=torch.float64)
        dist.all_gather(found, mine, group=group.DUMP_GROUP)
        self.whole = [float(part) for part in found]

    def _copy_main_params_to_model_params(self) -> None:
        pass

    def update_npu_tensor_to_safe(self) -> None:
        self.value = float("nan")

    def save_parameter_state(self, name: str) -> None:
        if self.need_write_file():
            Path(name).write_text(json.dumps(self.whole))

    def need_write_file(self) -> bool:
        return bool(self.rank == self.save_args["rank"])


def pretend(rank: int, saves: Path) -> Npu:
    """Install the stand-ins."""
    sys.meta_path.insert(0, Pretender())
    pretended: Any = importlib.import_module("megatron.training")
    args = SimpleNamespace(
        rank=rank, world_size=WORLD, save=str(saves), enable_hbmfault_repair=True, use_distributed_optimizer=True,
        expert_model_parallel_size=1, train_samples=None, global_batch_size=1, consumed_train_samples=0,
        no_save_optim=False, use_dist_ckpt=False, ckpt_format="torch", num_floating_point_operations_so_far=0,
    )  # fmt: skip
    pretended.get_args = lambda: args
    mpu: Any = importlib.import_module("megatron.core.mpu")
    importlib.import_module("megatron.core").mpu = mpu  # type: ignore[attr-defined]  # a stand-in has every name
    for what in ("pipeline", "tensor", "expert"):
        setattr(mpu, f"get_{what}_model_parallel_world_size", lambda: 1)
        setattr(mpu, f"get_{what}_model_parallel_rank", lambda: 0)
    files: Any = importlib.import_module("megatron.training.checkpointing")
    files.get_distributed_optimizer_checkpoint_name = lambda name: str(Path(name).parent / "distrib_optim.pt")
    files.ensure_directory_exists = lambda name: Path(name).parent.mkdir(parents=True, exist_ok=True)
    files.get_checkpoint_tracker_filename = lambda where: str(Path(where) / "latest_checkpointed_iteration.txt")
    files.generate_state_dict = lambda args, model, optimizer, *_, **__: {"whole": optimizer.whole}
    files.get_rng_state = lambda *_: []
    importlib.import_module("megatron.training.utils").unwrap_model = lambda model: model  # type: ignore[attr-defined]  # as above
    npu = Npu()
    recovery: Any = importlib.import_module("torch_npu.npu._recovery")
    recovery.update_npu_tensor_to_safe = lambda tensor: None
    device: Any = importlib.import_module("torch_npu")
    device.npu = npu
    world: Any = torch
    world.npu = npu
    world.distributed.reinit_process_group = lambda **_: npu.said.append("reinit_process_group")
    return npu


# ---------------------------------------------------------------------------------------------------------- the program


class Rank:
    def __init__(self, rank: int, fault: str, directory: Path, npu: Npu) -> None:
        self.rank, self.fault, self.directory, self.npu = rank, fault, directory, npu
        self.optimizer = Optimizer(rank)
        self.step = self.life = 0
        self.tft: Any = importlib.import_module("mindio_ttp.framework_ttp")

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not all((self.directory / name).exists() for name in names):
            if self.npu.stopped.is_set():
                raise RuntimeError("FORCE STOP: the device was stopped")
            assert time.monotonic() < deadline, names
            time.sleep(0.002)

    def train(self, *args: Any) -> int:
        """Replaces their training."""
        while self.step < STEPS:
            step = self.step + 1
            if (self.rank, step, self.life) == (VICTIM, HURT_AT, 0):
                self.wait_for(*(f"meet.0.{step}.{rank}" for rank in range(WORLD) if rank != VICTIM))
                if self.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("UCE ERROR, device error type 1")
            (self.directory / f"meet.{self.life}.{step}.{self.rank}").touch()
            self.wait_for(*(f"meet.{self.life}.{step}.{rank}" for rank in range(WORLD)))
            self.tft.tft_start_updating_os(-1)
            self.optimizer.value = self.optimizer.value * 3 + step + self.rank % 2
            self.step = step
            self.tft.tft_end_updating_os(step)
            self.tft.tft_pause_train(step)
        return self.step

    def repair(self, step: int, rebuild: bool, ranks: list[int], info: dict[str, Any], args: Any, ctx: Any) -> None:
        """Replaces their repair, which sends Megatron's buffers."""
        for src, dst in zip(info["src"], info["dst"], strict=True):
            sent = self.directory / f"sent.{src}.{dst}"
            if self.rank == src:
                draft = sent.with_suffix(".draft")
                draft.write_text(json.dumps(self.optimizer.value))
                draft.rename(sent)
            else:
                self.wait_for(sent.name)
                self.optimizer.value = json.loads(sent.read_text())
        self.npu.said.append(f"repair {info['repair_type']} {info['src']} {info['dst']}")

    def rollback(self, step: int, args: Any, ctx: Any) -> None:
        """Replaces their rollback, which rebuilds Megatron's data."""
        self.step, self.life = step, self.life + 1


def run(rank: int, fault: str, checkout: str, directory: Path, port: int, store_port: int) -> None:
    sys.path.insert(0, checkout)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1",
        "TTP_PORT": str(port), "TTP_RUN_DIR": str(directory / "run"), "TTP_SAVE_DIR": str(directory),
        "TTP_ABANDONED_S": "5",
    }  # fmt: skip
    put_into_place()
    npu = pretend(rank, directory / "saves")
    store = _dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    theirs: Any = importlib.import_module(f"{HOME}.tft_train_initialize")
    theirs.ttp_get_dp_cp_ranks = theirs.ttp_get_dp_ranks = lambda: list(range(WORLD))
    theirs.ttp_get_replica_dp_num, theirs.reinit_node_group = lambda: 2, lambda: None
    this = Rank(rank, fault, directory, npu)
    theirs.repair_callback, theirs.rollback_callback = this.repair, this.rollback
    theirs.tft_init_controller_processor()
    theirs.tft_register_processor()
    model = SimpleNamespace(bucket_groups=[], expert_parallel_bucket_groups=[], buffers=[], expert_parallel_buffers=[])
    scheduler = SimpleNamespace(num_steps=0, step=lambda count: None)
    step = theirs.tft_train_wrapper(this.train)(None, [model], this.optimizer, scheduler, None, None, None)
    told = json.dumps({"step": step, "value": this.optimizer.value, "said": npu.said})
    (directory / f"result{rank}.json").write_text(told)


def main() -> None:
    checkout, fault = sys.argv[1:]
    from tests.ports import free_port

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "saves").mkdir()
        store = _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        given = (fault, checkout, directory, free_port(), store.port)
        ranks = [context.Process(target=run, args=(rank, *given)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(PATIENCE_S)
            process.kill()
        print("exit codes", [process.exitcode for process in ranks])
        for path in sorted([*directory.glob("result*.json"), *directory.glob("saves/**/*")]):
            shown = path.read_text() if path.suffix in (".json", ".txt") or path.name == "distrib_optim.pt" else ""
            print(path.relative_to(directory), shown)


if __name__ == "__main__":
    main()
