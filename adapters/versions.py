"""Imports frameworks, and checks their versions against those that ttp was tested with."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Iterator
from typing import Any

from ttp.errors import ConfigError
from ttp.processor import continuing

log = logging.getLogger("ttp.adapters.frameworks")

TORCH_MIN = (2, 7)
"""Oldest version of torch with which checkpoints can be restored: older ones cannot load one in a single process."""
TORCHDATA = ("0.8", "0.11")
"""Oldest and newest tested version of torchdata, whose ``StatefulDataLoader`` users give to ttp as it is."""


def check_torch() -> None:
    """Check that the installed torch can restore checkpoints.

    Raises:
        ConfigError: the installed torch is older than ``TORCH_MIN``.
    """
    if numbers(version := _version("torch")) < TORCH_MIN:
        needed = ".".join(map(str, TORCH_MIN))
        raise ConfigError(f"torch {version} is too old: checkpoints can be restored with torch {needed} or later")


def require(package: str, module: str, tested: tuple[str, str], *, extra: str = "") -> Any:
    """Import a framework and return its module.

    Args:
        package: name of the framework's package.
        module: name of the module of ttp that needs it.
        tested: the oldest and the newest version with which ttp was tested. A version outside this range is logged as
            a warning.
        extra: name of the optional dependencies of ttp (``ttp-ft[extra]``) that install the framework; empty: the same
            as ``module``.

    Raises:
        ConfigError: the framework is not installed.
    """
    try:
        found = importlib.import_module(package)
    except ImportError as problem:
        install = f"pip install 'ttp-ft[{extra or module}]'"
        raise ConfigError(f"ttp.{module} needs {package}, which cannot be imported ({problem}): {install}") from problem
    version, (oldest, newest) = _version(package), tested
    if not numbers(oldest) <= numbers(version) <= numbers(newest):
        log.warning(
            "%s %s is outside the versions that ttp.%s was tested with (%s to %s): check with ttp.testing.kit that "
            "your job resumes after a killed rank",
            package,
            version,
            module,
            oldest,
            newest,
        )
    return found


@contextlib.contextmanager
def names_of(package: str, tested: tuple[str, str]) -> Iterator[None]:
    """Turn the failed import of a framework's name into a ``ConfigError`` that lists the tested versions.

    Put ``from framework import name`` under it where some versions of the framework lack the name.

    Args:
        package: name of the framework's package.
        tested: the oldest and the newest version with which ttp was tested.

    Raises:
        ConfigError: a name cannot be imported.
    """
    try:
        yield
    except ImportError as problem:
        oldest, newest = tested
        raise ConfigError(
            f"{package} {_version(package)} lacks a name that ttp imports ({problem}): "
            f"install a version that ttp was tested with, {oldest} to {newest}"
        ) from problem


def begins_once(framework: str) -> None:
    """Forbid ``TTP_CONTINUITY=keep`` to call ``train()`` a second time in this process.

    The framework's objects outlive ``train()`` and would keep step counts and process groups of the old launch.
    """
    if (survivor := continuing.current()) is not None:
        survivor.refuse(f"{framework} can begin only one training in a process")


def _version(package: str) -> str:
    return str(getattr(importlib.import_module(package), "__version__", "0"))


def numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: ``(2, 7)`` for ``2.7.1+cpu``."""
    first, second = re.findall(r"\d+", version + ".0.0")[:2]
    return int(first), int(second)
