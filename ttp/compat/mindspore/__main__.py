"""``python -m ttp.compat.mindspore SCRIPT ...`` or ``-m MODULE ...``: run a program with ttp's classes in MindSpore."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import ttp.compat.mindspore as _names_in_place

__all__ = ["_names_in_place", "main"]

USAGE = "usage: python -m ttp.compat.mindspore SCRIPT | -m MODULE [argument ...]"


def main(arguments: list[str]) -> None:
    """Run the program that ``arguments`` name, as ``__main__``.

    Raises:
        SystemExit: the arguments name no program, or the program raises it.
    """
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments and not arguments[0].startswith("-"):
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.exit(USAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
