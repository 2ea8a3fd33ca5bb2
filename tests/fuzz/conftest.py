"""Fixtures that these tests share with others."""

from tests.store.conftest import world

__all__ = ["world"]
