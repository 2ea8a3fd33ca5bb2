"""Whether a framework is there, and in a version that was tried."""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

from ttp.errors import ConfigError

log = logging.getLogger("ttp.adapters.frameworks")


def require(package: str, extra: str, tested: tuple[str, str]) -> Any:
    """Import a framework.

    Args:
        package: its name.
        extra: of ttp, that installs it.
        tested: the oldest and the newest version that ttp was tried with. Another one is warned of.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        module = importlib.import_module(package)
    except ImportError as problem:
        raise ConfigError(
            f"ttp.{extra} needs {package}, which cannot be imported ({problem}): pip install 'ttp-ft[{extra}]'"
        ) from problem
    version, (oldest, newest) = str(getattr(module, "__version__", "0")), tested
    if not numbers(oldest) <= numbers(version) <= numbers(newest):
        log.warning(
            "%s %s is none of the versions that ttp.%s was tested with (%s to %s): see with ttp.testing.kit that a "
            "killed rank of yours comes back",
            package,
            version,
            extra,
            oldest,
            newest,
        )
    return module


def numbers(version: str) -> tuple[int, int]:
    """The first two of a version; what follows does not matter."""
    first, second = re.findall(r"\d+", version + ".0.0")[:2]
    return int(first), int(second)
