"""Tensors in a file without a name: as much room as a large file needs, and no memory of the process.

``torch.save`` wants all tensors of a file at once. The kernel writes these to the disk when it needs the memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor


class Mapped:
    """A context manager; the tensors are gone when it ends.

    Args:
        directory: on whose disk they are, as long as somebody looks at them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open = ExitStack()
        self.count = 0
        """Tensors made."""

    def __enter__(self) -> Mapped:
        self._file = self._open.enter_context(TemporaryFile(dir=self._directory))
        return self

    def __exit__(self, *_exc: object) -> None:
        self._open.close()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new one, of zeros.

        Raises:
            OSError: the disk is full.
        """
        self.count += 1
        size = prod(shape) * dtype.itemsize
        if size == 0:
            return torch.zeros(tuple(shape), dtype=dtype)
        begin = -(-os.fstat(self._file.fileno()).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.posix_fallocate(self._file.fileno(), begin, size)  # a full disk says so here, not by a SIGBUS later
        memory = mmap.mmap(self._file.fileno(), size, offset=begin)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))
