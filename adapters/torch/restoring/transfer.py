"""Sends the kept state of a rank to a rank that has none, through the default process group.

The sender sends a description, then the tensors, small ones together, and last a digest of all bytes. The receiver
checks the digest before it uses the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ttp.adapters.torch.restoring.kept import Kept, KeptTensor, UnlikeError
from ttp.adapters.torch.tensor_memory import flat_bytes, packs
from ttp.core.layout import Version
from ttp.core.rank.kept_state import Origin
from ttp.store.encoding import decode, encode

PACK = 8 << 20
"""Bytes up to which tensors are sent together in one message. A larger tensor is sent alone."""


def give(kept: Kept, to: int) -> None:
    """Send ``kept`` to rank ``to``, which has to call ``receive``.

    Raises:
        RuntimeError: the other rank is lost.
    """
    tensors = kept.tensors()
    head = torch.frombuffer(bytearray(_described(kept, tensors)), dtype=torch.uint8)
    dist.send(torch.tensor([head.numel()], device="cpu"), to)
    dist.send(head, to)
    digest = xxhash.xxh3_128()
    for pack in _packs(tensors):
        found = [_bytes(tensor) for tensor in pack]
        data = found[0] if len(found) == 1 else torch.cat(found)
        sent = dist.isend(data, to)
        digest.update(data.numpy().data)
        assert sent is not None
        sent.wait()
    dist.send(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8), to)


def receive(source: int) -> Kept:
    """Receive the state of rank ``source``, which has to call ``give``.

    Raises:
        UnlikeError: the received bytes do not have the sender's digest.
        RuntimeError: the other rank is lost.
    """
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    dist.recv(size, source)
    head = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.recv(head, source)
    described: Any = decode(head.numpy().tobytes())
    tensors = [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="cpu")
        for dtype, shape, stride in described["tensors"]
    ]
    digest = xxhash.xxh3_128()
    for pack in _packs(tensors):
        parts = [_bytes(tensor) for tensor in pack]
        direct = len(parts) == 1 and pack[0].is_contiguous()
        data = parts[0] if direct else torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device="cpu")
        dist.recv(data, source)
        digest.update(data.numpy().data)
        if not direct:
            for tensor, part in zip(pack, torch.split(data, [part.numel() for part in parts]), strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a clone is aligned for every dtype
    sent = torch.empty(digest.digest_size, dtype=torch.uint8, device="cpu")
    dist.recv(sent, source)
    if sent.numpy().tobytes() != digest.digest():
        raise UnlikeError(f"the state that rank {source} sent was damaged on the way: its digest differs")
    return _kept(described, tensors)


def _described(kept: Kept, tensors: Sequence[Tensor]) -> bytes:
    number = {id(tensor): index for index, tensor in enumerate(tensors)}
    return encode(
        {
            "origin": [int(kept.origin.version), kept.origin.incident],
            "kind": kept.kind,
            "tensors": [[str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride())] for t in tensors],
            "parameters": [[name, number[id(tensor)]] for name, tensor in kept.parameters.items()],
            "optimizer": [
                [name, key, *((True, number[id(v.tensor)], v.cut) if isinstance(v, KeptTensor) else (False, v, False))]
                for name, values in kept.optimizer.items()
                for key, v in values.items()
            ],
        }
    )


def _kept(described: Any, tensors: Sequence[Tensor]) -> Kept:
    optimizer: dict[str, dict[str, Any]] = {}
    for name, key, is_tensor, value, cut in described["optimizer"]:
        optimizer.setdefault(name, {})[key] = KeptTensor(tensors[value], cut) if is_tensor else value
    version, incident = described["origin"]
    parameters = {name: tensors[index] for name, index in described["parameters"]}
    return Kept(Origin(Version(version), incident), described["kind"], parameters, optimizer)


def _packs(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors of each message. Tensors without bytes are not sent."""
    return packs((tensor for tensor in tensors if tensor.nbytes), lambda tensor: tensor, PACK, lambda _: None)


def _bytes(tensor: Tensor) -> Tensor:
    return flat_bytes(tensor.contiguous())
