from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def _load(name: str) -> Any:
    """A module beside this file; the folder is no package."""
    spec = importlib.util.spec_from_file_location(f"megatron_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def nursery() -> Iterator[Any]:
    """Worlds of ranks that have megatron-core imported already."""
    made = _load("nursery").Nursery()
    yield made
    made.close()
