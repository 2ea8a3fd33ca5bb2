"""Takes a series of bytes apart by the sizes that its own header gives, and trusts none of them."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T", bytes, memoryview)


class Sections(Generic[T]):
    """The sections of ``data`` from position ``at`` on, one after the other."""

    def __init__(self, data: T, at: int) -> None:
        self._data: T = data
        self._at = at

    def take(self, size: int) -> T:
        """Return the next section.

        Raises:
            ValueError: there are not so many bytes.
        """
        if size < 0 or self._at + size > len(self._data):
            raise ValueError(f"their header announces at least {self._at + size} bytes")
        self._at += size
        found: T = self._data[self._at - size : self._at]
        return found

    def end(self) -> None:
        """Check that this was the last section.

        Raises:
            ValueError: more bytes follow.
        """
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")
