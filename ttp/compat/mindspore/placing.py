"""Put ttp's classes into MindSpore's modules, without importing MindSpore before the program does."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "mindspore"
PLACES = {
    "OptTFTWrapper": ("mindspore.nn", "mindspore.nn.optim"),
    "TFTRegister": ("mindspore.train", "mindspore.train.callback"),
    "TrainFaultTolerance": ("mindspore", "mindspore.train", "mindspore.train.callback"),
}
"""The modules from which programs import each name."""


def put_into_place() -> None:
    """Put the names into MindSpore, now or when it is imported. Further calls have no effect."""
    if NAME in sys.modules:
        put_names()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def put_names() -> None:
    """Put ttp's classes into MindSpore's modules, and import these."""
    ours = importlib.import_module("ttp.adapters.mindspore")
    for name, places in PLACES.items():
        for place in places:
            setattr(importlib.import_module(place), name, getattr(ours, name))


class _Finder(MetaPathFinder):
    """Finds MindSpore in the usual way, and puts the names into it after its import.

    It stays in ``sys.meta_path``, as libraries call ``importlib.util.find_spec("mindspore")`` without an import.
    """

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder.find_spec``."""
        if fullname != NAME or self._looking:
            return None
        self._looking = True  # find_spec asks all finders, and this one has to leave the answer to the others
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See ``importlib.abc.Loader.create_module``."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See ``importlib.abc.Loader.exec_module``. Restores the original loader first, which other code may expect."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        put_names()
