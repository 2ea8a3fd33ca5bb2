"""Make ``import mindio_ttp`` find ``ttp.compat.mindio``, in this process and in its child processes.

This has to be requested: by ``import ttp.compat.mindio``, by ``ttp run --mindio``, or by ``TTP_MINDIO=1`` with ``ttp
run``. Child processes find the package through a directory at the end of ``PYTHONPATH`` that contains nothing else. If
the original is installed, it is used, with a warning, unless ``TTP_MINDIO=force`` is set.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from ttp.config import MINDIO_FORCE, MINDIO_SWITCH
from ttp.errors import ConfigError

log = logging.getLogger("ttp.compat.mindio")

NAME = "mindio_ttp"
HOME = "ttp.compat.mindio"
CLOSED = ("adaptor", "modellink")
"""Modules of older packages that connect MindIO to MindSpeed-LLM. Their source was never published."""
OURS = "ttp.adapters.megatron"
ON_PATH = str(Path(__file__).parent.parent / "on_path")
STUBS = str(Path(os.sep, "ttp", "compat", "on_path"))
"""End of ``ON_PATH`` in any copy of ttp: a parent process may have used another copy."""


class Finder(MetaPathFinder):
    """Finds ``mindio_ttp`` and its submodules, as the module objects of ``ttp.compat.mindio``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder.find_spec``."""
        if fullname != NAME and not fullname.startswith(NAME + "."):
            return None
        own = HOME + fullname.removeprefix(NAME)
        if own.removeprefix(f"{HOME}.") in CLOSED:
            log.error("%s is not in ttp: use MindSpeed-LLM from 2.3.0 on, which has it itself, or %s", fullname, OURS)
        return None if importlib.util.find_spec(own) is None else ModuleSpec(fullname, _Alias(own))


class _Alias(Loader):
    def __init__(self, own: str) -> None:
        self._own = own

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of ``ttp.compat.mindio`` into ``sys.modules``, from where importlib returns it."""
        sys.modules[module.__name__] = importlib.import_module(self._own)


def put_into_place() -> bool:
    """Make ``mindio_ttp`` importable, here and in child processes.

    Returns:
        True if ``mindio_ttp`` is now ttp's; False if the original is installed and is used.

    Raises:
        ConfigError: the original should be replaced, but was imported already.
    """
    tell_children(os.environ)
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return True
    original = find_original()
    forced = os.environ[MINDIO_SWITCH] == MINDIO_FORCE
    if original is not None and not forced:
        log.warning(
            "the original %s is installed (%s) and is used. ttp's own takes its place only with %s=%s",
            NAME, original.origin, MINDIO_SWITCH, MINDIO_FORCE,
        )  # fmt: skip
        return False
    loaded = sys.modules.get(NAME)
    if loaded is not None and not _is_stub(loaded):
        raise ConfigError(
            f"{NAME} of {getattr(loaded, '__file__', '?')} is imported already: import {HOME} before it, or start the "
            "program with `ttp run --mindio`"
        )
    sys.meta_path.insert(0, Finder())
    return True


def stand_in() -> None:
    """Replace the stub found through ``PYTHONPATH`` by ttp's package, or by the original if that is installed."""
    importlib.import_module(HOME)  # this installs the Finder, unless the original is used
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.modules[NAME] = sys.modules[HOME]
        return
    sys.path[:] = _elsewhere()
    del sys.modules[NAME]
    importlib.import_module(NAME)


def ours_counts(said: str) -> bool:
    """Return whether ``mindio_ttp`` is ttp's for the value ``said`` of ``TTP_MINDIO``."""
    return said == MINDIO_FORCE or find_original() is None


def find_original() -> ModuleSpec | None:
    """Return the spec of the vendor's package; None if it is not installed."""
    return PathFinder.find_spec(NAME, _elsewhere())


def tell_children(environ: MutableMapping[str, str]) -> None:
    """Make Python processes with this environment find ``mindio_ttp``, after all other packages of that name."""
    if environ.get(MINDIO_SWITCH, "") in ("", "0", "off"):
        environ[MINDIO_SWITCH] = "1"
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if ON_PATH not in entries:
        environ["PYTHONPATH"] = os.pathsep.join([*entries, ON_PATH])


def _elsewhere() -> list[str]:
    return [entry for entry in sys.path if not entry.endswith(STUBS)]


def _is_stub(module: ModuleType) -> bool:
    return str(Path(getattr(module, "__file__", None) or "").parent.parent).endswith(STUBS)
