"""What these tests borrow from others."""

from tests.store.conftest import world

__all__ = ["world"]
