"""Whether a framework is there, and in a version that was tried."""

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

TORCHDATA = ("0.8", "0.11")
"""Of its ``StatefulDataLoader``, which is given to ttp as it is."""


def require(package: str, module: str, tested: tuple[str, str], *, extra: str = "") -> Any:
    """Import a framework.

    Args:
        package: its name.
        module: of ttp, that needs it.
        tested: the oldest and the newest version that ttp was tried with. Another one is warned of.
        extra: of ttp, that installs it; empty: it is called as the module is.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        found = importlib.import_module(package)
    except ImportError as problem:
        install = f"pip install 'ttp-ft[{extra or module}]'"
        raise ConfigError(f"ttp.{module} needs {package}, which cannot be imported ({problem}): {install}") from problem
    version, (oldest, newest) = _version(package), tested
    if not numbers(oldest) <= numbers(version) <= numbers(newest):
        log.warning(
            "%s %s is none of the versions that ttp.%s was tested with (%s to %s): see with ttp.testing.kit that a "
            "killed rank of yours comes back",
            package,
            version,
            module,
            oldest,
            newest,
        )
    return found


@contextlib.contextmanager
def names_of(package: str, tested: tuple[str, str]) -> Iterator[None]:
    """Around the imports of what is used of it: not all of that is in every version.

    Raises:
        ConfigError: something is not.
    """
    try:
        yield
    except ImportError as problem:
        oldest, newest = tested
        raise ConfigError(
            f"{package} {_version(package)} has not what ttp needs ({problem}). It was tested with {oldest} to {newest}"
        ) from problem


def begins_once(framework: str) -> None:
    """Objects of the framework count on, and hold process groups, where train() is called again in the same process."""
    if (goes_on := continuing.current()) is not None:
        goes_on.refuse(f"{framework} begins a training once in a process")


def _version(package: str) -> str:
    return str(getattr(importlib.import_module(package), "__version__", "0"))


def numbers(version: str) -> tuple[int, int]:
    """The first two of a version; what follows does not matter."""
    first, second = re.findall(r"\d+", version + ".0.0")[:2]
    return int(first), int(second)
