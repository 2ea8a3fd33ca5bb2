"""Checks what the suite for one GPU needs of the Python that runs it. Imports only the modules that it checks.

``python -m tests.gpu.needs`` prints in one sentence what is missing, and exits with 1 then.
"""

from __future__ import annotations

import importlib.util
import sys

MODULES = {
    "torch": "torch (2.7 or later, built for CUDA)",
    "numpy": "numpy",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "google.protobuf": "protobuf",
    "msgpack": "msgpack",
    "psutil": "psutil",
    "rich": "rich",
    "typer": "typer",
    "xxhash": "xxhash",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
TORCH_MIN = (2, 7)


def missing() -> str:
    """Return why the suite cannot run here, and what to do; empty: it can."""
    if sys.version_info < (3, 10):  # noqa: UP036 - whoever names a Python may name an old one
        return f"Python 3.10 or later is needed, this is {sys.version.split()[0]}: make test-gpu PYTHON=python3.12"
    absent = [package for module, package in MODULES.items() if not _found(module)]
    if absent:
        return (
            f"{sys.executable} lacks {', '.join(absent)}: nothing is installed here; name another Python "
            "(make test-gpu PYTHON=...), or add a folder with what is missing to PYTHONPATH (pip install --target)"
        )
    return _without_device()


def _without_device() -> str:
    import torch

    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < TORCH_MIN:
        return f"torch {'.'.join(map(str, TORCH_MIN))} or later is needed, {sys.executable} has {torch.__version__}"
    if torch.version.cuda is None:
        return f"{sys.executable} has torch {torch.__version__}, which is not built for CUDA: name another PYTHON"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device here: the suite needs one NVIDIA GPU and its driver"
    return ""


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(f"make test-gpu: {reason}" if (reason := missing()) else 0)
