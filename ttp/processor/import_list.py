"""Tells the launcher of this host which modules its ranks have imported, so that later ranks can be forked."""

from __future__ import annotations

import importlib.machinery
import json
import logging
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from ttp.launch.warm.memory import anonymous
from ttp.launch.warm.rules import digest
from ttp.store.durable import replace_file

log = logging.getLogger("ttp.processor")

FILE = "imports.json"
AFTER_UPDATES = 3
"""Updates after which the list is written: by then the training loop has made its late imports."""


class ImportList:
    """Writes ``imports.json`` once, when this process has made a few updates.

    Args:
        run_dir: directory of the file; shared with the launcher of this host.
        wanted: whether this rank writes it: one rank of each host is enough.
    """

    def __init__(self, run_dir: Path, *, wanted: bool) -> None:
        self._run_dir, self._wanted = run_dir, wanted
        self._first: int | None = None

    def due(self, version: int) -> bool:
        """Return True once, when it is time to write.

        Args:
            version: finished updates.
        """
        if not self._wanted:
            return False
        self._first = version if self._first is None else self._first
        self._wanted = version - self._first < AFTER_UPDATES
        return not self._wanted

    def write(self) -> None:
        """Write the file. Takes some milliseconds; never raises."""
        try:
            self._write()
        except Exception as problem:
            log.debug("cannot write the list of imported modules: %r", problem)

    def _write(self) -> None:
        found = [[name, file] for name, module in list(sys.modules.items()) if (file := _file(name, module))]
        path = sys.path[0 if getattr(sys.flags, "safe_path", False) else 1 :]
        environ = {name: digest(value) for name, value in os.environ.items()}
        facts = {"path": path, "modules": found, "environ": environ, "bytes": anonymous()}
        replace_file(self._run_dir / FILE, json.dumps(facts).encode())


def is_library(file: str) -> bool:
    """Return whether a file belongs to an installed package; the user's own files are imported anew by each program."""
    return file.startswith(_ROOTS) or any(f"/{folder}/" in file for folder in ("site-packages", "dist-packages"))


_ROOTS = tuple(
    f"{root}/" for root in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parents[1]}
)


def _file(name: str, module: Any) -> str:
    """Return the file that a module was loaded from; empty for modules that are not to be imported ahead."""
    spec = getattr(module, "__spec__", None)
    if spec is None or spec.name != name or name == "__main__":
        return ""
    if not isinstance(spec.loader, (importlib.machinery.SourceFileLoader, importlib.machinery.ExtensionFileLoader)):
        return ""
    file = spec.origin or ""
    return file if is_library(file) else ""
