"""Imports the code that makes ``mindio_ttp`` importable, and undoes that: this process and its children run other tests
too.
"""

from __future__ import annotations

import importlib
import os
import sys

_kept = {name: os.environ.get(name) for name in ("TTP_MINDIO", "PYTHONPATH")}
_finders = list(sys.meta_path)
importlib.import_module("ttp.compat.mindio")
sys.meta_path[:] = _finders
for _name, _value in _kept.items():
    os.environ.pop(_name, None)
    if _value is not None:
        os.environ[_name] = _value
