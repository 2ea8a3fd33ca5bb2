"""A small world of gloo processes that each run one function. Torch is imported once, by the server that forks them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import traceback
import uuid
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.forking import fork

TIMEOUT_S = 500


def run_world(
    directory: Path,
    module: str,
    function: str,
    size: int = 4,
    env: Mapping[str, str] = MappingProxyType({}),
    wait_for: Sequence[int] = (),
) -> list[Any]:
    """Run ``function(directory, rank)`` of ``module`` on every rank. Returns the results, passed as JSON.

    The result of a rank that leaves by ``os._exit(0)`` is None. If ``wait_for`` names ranks, the others are killed.

    Raises:
        AssertionError: a rank failed; its traceback is in the text.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in (*directory.glob("failed*"), *directory.glob("told*.json")):
        left.unlink()
    env = {**env, "WORLD_STORE": str(directory / f"store.{uuid.uuid4().hex}")}  # never one that was used before
    ranks = [fork(_rank, (directory, module, function, rank, size, dict(env))) for rank in range(size)]
    try:
        return [_told(directory, rank, ranks[rank]) for rank in wait_for or range(size)]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _told(directory: Path, rank: int, process: BaseProcess) -> Any:
    process.join(TIMEOUT_S)
    failures = [path.read_text() for path in sorted(directory.glob("failed*"))]
    assert not failures, "\n".join(failures)
    assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
    told = directory / f"told{rank}.json"
    return json.loads(told.read_text()) if told.exists() else None


def _rank(directory: Path, module: str, function: str, rank: int, size: int, env: dict[str, str]) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), **env}
    try:
        store = f"file://{env['WORLD_STORE']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        told = getattr(importlib.import_module(module), function)(directory, rank)
        (directory / f"told{rank}.json").write_text(json.dumps(told))
        with contextlib.suppress(RuntimeError):  # a rank has left
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        (directory / f"failed{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    os._exit(0)
