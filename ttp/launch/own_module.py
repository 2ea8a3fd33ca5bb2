"""Runs modules of ttp in processes of their own, which do not import from the current directory, unlike ``python -m``.

A ``queue.py`` or ``platform.py`` of the user's there would otherwise take the place of Python's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
CODE = (
    "import sys; root, name = sys.argv[1:3]; del sys.argv[1:3]; sys.path[:] = [entry for entry in sys.path if entry]; "
    "root in sys.path or sys.path.insert(0, root); "  # ttp itself may have been found through the current directory
    "import runpy; runpy.run_module(name, run_name='__main__', alter_sys=True)"
)


def own_module(name: str) -> tuple[str, ...]:
    """Return the command line, without arguments, that runs a module of ttp."""
    return (sys.executable, "-c", CODE, ROOT, name)
