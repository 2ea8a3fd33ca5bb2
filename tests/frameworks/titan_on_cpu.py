"""Makes torchtitan take the CPU for an accelerator, which it looks for at its import. Import this module first.

It replaces the questions about a device's name and memory, and two modules that are not called here and need packages
that the CPU build of torch lacks. Everything else, the Trainer included, is torchtitan's own.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools import utils


class Cpu:
    """``torch.cpu``, with the further functions that ``torch.cuda`` has."""

    get_device_name = staticmethod(lambda _device: "CPU")
    get_device_properties = staticmethod(lambda _device: SimpleNamespace(total_memory=1 << 30))
    memory_stats = staticmethod(lambda _device: dict[str, int]())
    empty_cache = reset_peak_memory_stats = manual_seed = manual_seed_all = set_device = staticmethod(lambda *_: None)
    current_device = staticmethod(lambda: 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


class Uncalled(ModuleType):
    """A module of which only names are imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(Config=lambda **_: None)


utils.device_type, utils.device_module = "cpu", Cpu()
utils.get_local_device = lambda: torch.device("cpu")
for wants, name in (("triton", "distributed.minimal_async_ep.kernels"), ("datasets", "hf_datasets.text_datasets")):
    if importlib.util.find_spec(wants) is None:
        sys.modules[f"torchtitan.{name}"] = Uncalled(f"torchtitan.{name}")

if not hasattr(dist, "set_timeout"):  # which a torch newer than 2.13 has
    vars(dist)["set_timeout"] = lambda *_: None
importlib.import_module("torchtitan.trainer")
