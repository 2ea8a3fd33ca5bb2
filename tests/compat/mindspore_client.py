"""Runs MindSpore's own, unchanged client of ``mindio_ttp``: ``_tft_handler``, ``TrainFaultTolerance``, ``Model.train``.

The client works only on Ascend, so the calls that it makes to the device are faked: the device's name, its kernels and
its collectives, which are files of ``JOB_DIR``. All code that speaks to ``mindio_ttp`` is MindSpore's.

``python mindspore_client.py FAULT`` with ``FAULT`` one of ``kill``, ``uce``, ``none``: the fault of rank 1 in step 3.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

DIR, RANK, WORLD = Path(os.environ["JOB_DIR"]), int(os.environ["MS_NODE_ID"]), int(os.environ["MS_WORKER_NUM"])
FAULT, STEPS, HURT_AT = sys.argv[1], 6, 3
PATIENCE_S = 120.0

client: Any = importlib.import_module("mindspore.train.callback._train_fault_tolerance")
handle: Any = importlib.import_module("mindspore.utils.utils")
model_module: Any = importlib.import_module("mindspore.train.model")

stopped = threading.Event()
said: list[str] = []
updates, life = 0, 0


def note(name: str, result: Any = None) -> Any:
    """Record a call of the device that has no other effect here."""

    def made(*_: Any, **__: Any) -> Any:
        said.append(name)
        return result

    return made


def wait_for(*names: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all((DIR / name).exists() for name in names):
        if stopped.is_set():
            raise RuntimeError("ForceStopError: the device was stopped")
        assert time.monotonic() < deadline, names
        time.sleep(0.002)


class AllReduce:
    """The all-reduce of a flag that is one on every rank; here ranks meet before the update."""

    def add_prim_attr(self, *_: Any) -> AllReduce:
        return self

    def __call__(self, flag: Any) -> Any:
        global updates
        step = updates + 1
        if (RANK, step, life) == (1, HURT_AT, 0) and FAULT != "none":
            wait_for(*(f"meet.{life}.{step}.{rank}" for rank in range(WORLD) if rank != RANK))  # their updates are made
            if FAULT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if FAULT == "uce":
                raise RuntimeError("UCEError: error_code=507053 memory is lost")
        (DIR / f"meet.{life}.{step}.{RANK}").touch()
        wait_for(*(f"meet.{life}.{step}.{rank}" for rank in range(WORLD)))
        updates = step
        return flag * WORLD


class TensorReport:
    """The kernel that reports the beginning of an update through a library of the original."""

    def __init__(self) -> None:
        self._end = False

    def add_prim_attr(self, name: str, _: Any) -> TensorReport:
        self._end |= name == "optimizer_end"
        return self

    def __call__(self, _: str, value: Any) -> Any:
        if not self._end:
            handle._tft_handler.get_tft().tft_start_updating_os(-1)
        return value


def stop_device(_: int) -> None:
    said.append("stop_device")
    stopped.set()


def send_recv(parameters: list[Any], source: int, target: int) -> int:
    said.append(f"send_recv {source} {target}")
    path = DIR / f"sent.{source}.{target}.npz"
    if source == RANK:
        draft = DIR / f".sent.{RANK}.npz"
        np.savez(draft, *[p.asnumpy() for p in parameters])
        draft.rename(path)
        return 0
    while not path.exists():
        time.sleep(0.002)
    with np.load(path) as sent:
        for number, parameter in enumerate(parameters):
            parameter.set_data(ms.Tensor(sent[f"arr_{number}"]))
    return 0


def clean_tdt_channel() -> None:
    global life, updates
    said.append("clean")
    stopped.clear()
    life, updates = life + 1, HURT_AT - 1


def fake_the_device() -> None:
    real = ms.context
    as_ascend = SimpleNamespace(
        get_context=lambda key: "Ascend" if key == "device_target" else real.get_context(key),
        get_auto_parallel_context=lambda key: (
            "data_parallel" if key == "parallel_mode" else real.get_auto_parallel_context(key)
        ),
    )
    client.context = handle.context = as_ascend
    client.get_rank, client.get_group_size = lambda: RANK, lambda: WORLD
    client.ops = SimpleNamespace(Depend=ms.ops.Depend, Assign=ms.ops.Assign, AllReduce=AllReduce)
    client.TensorReport = TensorReport
    client._stop_device, client.clean_tdt_channel, client.send_recv = stop_device, clean_tdt_channel, send_recv
    client.direct_copy_to_host = lambda parameter: parameter.asnumpy()[0]
    client._get_uce_process_strategy = lambda: "RS_UCE_HIGHLEVEL"
    client.reset_params = len
    client.CollectiveManager = SimpleNamespace(get_instance=lambda: SimpleNamespace(resume_hccl_comm=note("resume")))
    for name in ("_repair_device", "_get_uce_mem_info", "_tft_sem_enable", "_tft_sem_post", "_reset_opt_event_info"):
        setattr(client, name, note(name))
    handle._tft_start_record_threads = handle._tft_finish_record_threads = note("threads")
    model_module._reset_error_state = note("reset")
    whole = client.save_checkpoint

    def save_checkpoint(network: Any, path: str, append_dict: dict[str, Any], **how: Any) -> None:
        del append_dict["__exception_save__"]  # asks for a stream of the device
        whole(network, path, append_dict=append_dict, **how)

    client.save_checkpoint = save_checkpoint


class Sgd(nn.Optimizer):  # type: ignore[misc]  # MindSpore has no types
    """An optimizer in Python. Their own are compiled, which Python kernels cannot be."""

    def construct(self, gradients: Any) -> bool:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.set_data(parameter - 0.1 * gradient)
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        return True


class Rows:
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        generator = np.random.default_rng(index)
        return generator.random(4, dtype=np.float32), generator.random(2, dtype=np.float32)

    def __len__(self) -> int:
        return STEPS * 2


def main() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(1)
    fake_the_device()
    handle._tft_handler.init(config=None)
    network = nn.Dense(4, 2, weight_init=ms.Tensor(np.full((2, 4), 0.1, np.float32)))
    wrapped = client.TrainFaultTolerance.get_optimizer_wrapper(Sgd)
    optimizer = wrapped(0.1, network.trainable_params())
    model = ms.Model(network, nn.MSELoss(), optimizer)
    data = ms.dataset.GeneratorDataset(Rows(), ["x", "y"], shuffle=False).batch(2)
    callback = client.TrainFaultTolerance(str(DIR / "saves"))
    model.train(1, data, callbacks=[callback], dataset_sink_mode=False)
    weights = network.weight.asnumpy().astype(float).tolist()
    (DIR / f"result{RANK}.json").write_text(json.dumps({"weights": weights, "said": said}))


if __name__ == "__main__":
    main()
