"""A rank of Megatron-LM's own ``pretrain_gpt.py``, unchanged, without an accelerator; see ``test_megatron_lm.py``.

``MEGATRON_LM`` names the checkout; megatron.core is the installed package. ``LM_ARGS`` are its arguments, ``LM_KILL``
is the rank and the iteration in which it ends, in the first life. ``LM_PLAIN`` leaves ttp out.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.append(os.environ["MEGATRON_LM"])

import torch

from tests.adapters.megatron import shims, worlds

LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
RANK = int(os.environ["RANK"])
NOT_USED = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    *("six", "pydantic", "requests", "regex", "sentencepiece", "tiktoken", "yaml"),
)
"""What it imports and this training has no use for: where it is not installed, something empty takes its place."""


class Empty(ModuleType):
    """A module in which every name is a function that returns its argument, as a decorator would."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_kwargs: args[0] if args and callable(args[0]) else None


class Event:
    """A stand-in for an event of a device."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_args: Any) -> None: ...

    def elapsed_time(self, _other: Any) -> float:
        return 1.0


def _look_like_a_device() -> None:
    properties = {"name": "cpu", "gcnArchName": "", "major": 8, "minor": 0, "total_memory": 1}
    found = SimpleNamespace(multi_processor_count=1, **properties)
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "set_device": None, "empty_cache": None, "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "memory_stats": {},
        "reset_peak_memory_stats": None, "get_device_capability": (8, 0), "manual_seed_all": None,
        "get_device_name": "cpu", "is_initialized": False, "is_current_stream_capturing": False,
        "get_device_properties": found,
    }  # fmt: skip
    cuda: Any = torch.cuda
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_args, answer=answer, **_kwargs: answer)
    cuda.Event = Event


def _fill_gaps() -> None:
    for name in NOT_USED:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = Empty(name)


def _skip_kernels() -> None:
    """Compile nothing: neither fused kernels nor the data set's helper, which the installed package has."""
    for module, name in (
        ("megatron.training.initialize", "set_jit_fusion_options"),
        ("megatron.training.training", "set_jit_fusion_options"),
        ("megatron.legacy.fused_kernels", "load"),
        ("megatron.core.datasets.utils", "compile_helpers"),
    ):
        setattr(importlib.import_module(module), name, lambda *_args, **_kwargs: None)


def _watch(training: Any) -> None:
    """Record this rank's state at each version, as ``worlds`` does, and kill it where the test says."""
    train_step, train = training.train_step, training.train
    rank, iteration = map(int, os.environ.get("LM_KILL", "-1:-1").split(":"))

    def note(model: Any, optimizer: Any, scheduler: Any, version: int) -> None:
        args = training.get_args()
        seen: Any = SimpleNamespace(args=None, chunks=model, optimizer=optimizer, scheduler=scheduler, losses=[])
        found = worlds.summary(seen)
        state = worlds.digest(*(found[name].encode() for name in ("weights", "main", "moments", "groups", "schedule")))
        path = Path(os.environ["JOB_DIR"]) / f"rank{RANK}.log"
        with path.open("a") as log:
            log.write(f"{LIFE} {version} {state} {found['rng']} {args.consumed_train_samples}\n")

    def watched_step(
        step: Any, samples: Any, model: Any, optimizer: Any, scheduler: Any, *more: Any, **how: Any
    ) -> Any:
        version = training.get_args().curr_iteration
        note(model, optimizer, scheduler, version)
        if (LIFE, RANK, version) == (0, rank, iteration):
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(step, samples, model, optimizer, scheduler, *more, **how)

    def watched(step: Any, model: Any, optimizer: Any, scheduler: Any, *more: Any, **how: Any) -> Any:
        done = train(step, model, optimizer, scheduler, *more, **how)
        note(model, optimizer, scheduler, done[0])
        return done

    training.train_step, training.train = watched_step, watched


def main() -> None:
    """Run the program to its end."""
    _look_like_a_device()
    _fill_gaps()
    shims.apply()
    _skip_kernels()
    training = importlib.import_module("megatron.training.training")
    _watch(training)
    if "LM_PLAIN" not in os.environ:
        from ttp.adapters.megatron import install

        install(save_dir=Path(os.environ["JOB_DIR"]) / "checkpoints")
    program = str(Path(os.environ["MEGATRON_LM"]) / "pretrain_gpt.py")
    sys.argv = [program, *os.environ["LM_ARGS"].split()]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
