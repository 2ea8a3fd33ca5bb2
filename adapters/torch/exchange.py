"""Small messages between all ranks through the default process group: plain bytes, no pickle."""

from __future__ import annotations

import torch
import torch.distributed as dist


def connected(world_size: int) -> bool:
    """Whether there is a default process group of this size."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size


def gather_bytes(data: bytes) -> list[bytes]:
    """The ``data`` of every rank, by rank. Costs world size times the longest in memory."""
    size = torch.tensor([len(data)], device=_device())
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    padded = torch.zeros(max(int(s) for s in sizes), dtype=torch.uint8, device=_device())
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device())
    everyone = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [_bytes(blob[: int(length)]) for blob, length in zip(everyone, sizes, strict=True)]


def broadcast_bytes(data: bytes, source: int) -> bytes:
    """The ``data`` of rank ``source``; that of others is ignored."""
    size = torch.tensor([len(data)], device=_device())
    dist.broadcast(size, source)
    content = torch.zeros(int(size), dtype=torch.uint8, device=_device())
    if dist.get_rank() == source:
        content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(content, source)
    return _bytes(content)


def _bytes(content: torch.Tensor) -> bytes:
    return content.cpu().numpy().tobytes()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
