"""Writes ``metadata.json`` and ``common.pt``, which unmodified Megatron needs to read a checkpoint of ttp.

The tensors themselves are already in Megatron's ``torch_dist`` format, with the names of its ``fully_reshardable``
form. ttp itself does not read these two files.
"""

from __future__ import annotations

import copy
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.megatron.optimizers import Inner, with_counts
from ttp.adapters.megatron.rank_state import PROGRESS
from ttp.adapters.torch.local_state.image import read_local_state
from ttp.adapters.torch.restoring.reader import read_value
from ttp.adapters.torch.saving.job_state import JobState, read_job_state
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.core.layout import Shard
from ttp.core.messages import Commit, Piece
from ttp.processor.local_state.local_piece import ranks_kept
from ttp.store.digest import digest_bytes
from ttp.store.durable import write_durably
from ttp.store.encoding import decode
from ttp.store.json_text import parse_json

log = logging.getLogger("ttp.adapters.megatron")

JOB_KEY = "megatron"
"""Key, in ``JobState.extra``, of Megatron's state that is equal on all ranks."""
COUNT_PREFIX = "ttp.count."
"""Prefix of the entry with an optimizer's count of updates in the file of its shard; see ``read_megatron_job``."""
STOCK_KIND = "stock"
"""Kind of these pieces in the manifest."""
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""The content metadata that Megatron reads from a checkpoint before it lists the tensors to load."""


def count_entry(shard: Shard, saved: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the count of updates as an entry for the file of ``shard``; empty: the optimizer counts none.

    Args:
        shard: the shard.
        saved: its optimizer, as in the job state.
    """
    counts = [saved["step"], *(group.get("step") for group in saved["groups"])]
    step, *groups = (count.item() if isinstance(count, Tensor) else count for count in counts)
    entry = {"class": saved["class"], "step": step, "groups": [{"step": count} for count in groups]}
    return {} if counts.count(None) == len(counts) else {f"{COUNT_PREFIX}{shard}/shard_0_1": [json.dumps(entry)]}


def read_megatron_job(path: Path, pieces: Sequence[Piece]) -> JobState:
    """Read the job state. Its counts of updates are completed from the shards.

    The rank that wrote the job state may train no parameter (a frozen pipeline stage), and then has counted nothing.
    """
    job = read_job_state(path, pieces)
    ours: dict[str, Any] = job.extra.get(JOB_KEY, {})
    saved = ours.get("optimizers", [])
    if all(each["step"] is not None or any("step" in group for group in each["groups"]) for each in saved):
        return job
    counts = (item for item in items_of(pieces) if item.key.startswith(COUNT_PREFIX))
    counted = with_counts([*saved, *(parse_json(*read_value(path, item)) for item in counts)])[: len(saved)]
    return replace(job, extra=job.extra | {JOB_KEY: ours | {"optimizers": counted}})


def write_stock_files(draft: Path, order: Commit, inners: Sequence[Inner], args: Any) -> list[Piece]:
    """Write both files, durably. If ``common.pt`` cannot be made, neither is written: ttp does not need them.

    Args:
        draft: the draft of the checkpoint, with the pieces of ``order`` in it.
        order: the order to commit.
        inners: the plain optimizers of this rank.
        args: Megatron-LM's namespace, or None.

    Returns:
        The files as pieces.

    Raises:
        OSError: the storage failed.
    """
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    files = {"metadata.json": json.dumps(backend | {"common_backend": "torch", "common_backend_version": 1}).encode()}
    try:
        job, progress = read_megatron_job(draft, order.pieces), progress_of(draft, order.pieces)
        files["common.pt"] = _saved(_common(job, progress, inners, args))
    except Exception as problem:
        log.warning("only ttp can read this checkpoint, not Megatron itself: common.pt cannot be made: %s", problem)
        return []
    pieces = []
    for name, data in files.items():
        write_durably(draft / name, data)
        pieces.append(Piece(name, len(data), digest_bytes(data), STOCK_KIND, "", order.rank))
    return pieces


def _saved(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def progress_of(draft: Path, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Read counters and loss scales from the page of any rank (all ranks keep them); empty: all pages are lost."""
    for rank in ranks_kept(pieces):
        local = read_local_state(draft, pieces, rank)
        if local is not None and PROGRESS in local.extra:
            return dict(decode(local.extra[PROGRESS]))
    return {}


def _common(job: JobState, progress: dict[str, Any], inners: Sequence[Inner], args: Any) -> dict[str, Any]:
    """Return the state that is not cut into shards, in the form of Megatron-LM's ``generate_state_dict``."""
    saved, scalers = job.extra[JOB_KEY]["optimizers"], iter(progress.get("scalers", ()))
    optimizers = [_optimizer(inner, each) for inner, each in zip(inners, saved, strict=True)]
    for inner, state in zip(inners, optimizers, strict=True):
        if getattr(inner.megatron, "grad_scaler", None) is not None:
            state["grad_scaler"] = {k: torch.tensor([v]) if k == "scale" else v for k, v in next(scalers, {}).items()}
    counters = progress.get("counters", {})
    common: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": counters.get("iteration", job.version),
        "optimizer": optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers)),
        "content_metadata": CONTENT,
    }
    if job.scheduler is not None:
        due = job.extra[JOB_KEY]["increment"] if job.scheduler_pending else 0
        common["opt_param_scheduler"] = job.scheduler | {"num_steps": job.scheduler["num_steps"] + due}
    if args is not None:
        common["args"] = copy.copy(args)
        vars(common["args"]).update(counters)
    return common


def _optimizer(inner: Inner, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an optimizer's state that belongs into ``common.pt``, in the form of its Megatron class."""
    groups, step = [dict(group) for group in saved["groups"]], saved["step"]
    if inner.main_key == "param":
        for group in groups:
            group.update({} if step is None else {"step": step})
        sharding = CONTENT["distrib_optim_sharding_type"]
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": sharding}
    number = 0
    for group, live in zip(groups, inner.optimizer.param_groups, strict=True):
        group["params"] = list(range(number, number := number + len(live["params"])))
    state = {} if step is None else {"common_step": step}
    plain = {"state": state, "param_groups": groups}
    return {"optimizer": plain} if inner.main_key else plain
