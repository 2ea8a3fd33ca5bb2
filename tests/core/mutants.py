"""Breaks the core on purpose in many ways, and finds out which tests notice.

The changes are in ``mutants.txt``. ``python -m tests.core.mutants`` prints a table (``--quick``: until the first suite
notices); ``python -m tests.core.mutants NAME SUITE`` runs one suite on one mutant. A mutant that no suite catches is a
hole in the tests.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def _read(text: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Return for each mutant its module, the original text, and the text that replaces it."""
    for entry in text.split("\n\n")[1:]:
        head, *lines = entry.strip("\n").splitlines()
        name, _, module = head.rpartition(": ")
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        yield name, (module, old, new)


MUTANTS = dict(_read((HERE / "mutants.txt").read_text()))


def _suites() -> dict[str, list[str]]:
    """Return the test files of each suite: those that explore worlds, those that simulate jobs, and all others."""
    files = sorted(path.name for path in HERE.glob("test_*.py") if path.name != "test_mutants.py")
    model = [name for name in files if name.startswith("test_model_")]
    simulation = [name for name in files if name.startswith("test_simulat")]
    tables = [name for name in files if name not in (*model, *simulation)]
    gate = [f"../processor/test_{name}.py" for name in ("gate", "freeze_answers", "device_answers")]
    return {"tables": [*tables, *gate], "model": model, "simulation": simulation}


SUITES = _suites()


def mutate(name: str) -> None:
    """Import the mutated module in place of the original, before anything else of ttp is imported."""
    module_name, old, new = MUTANTS[name]
    spec = importlib.util.find_spec(module_name)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    if source.count(old) != 1:
        sys.exit(3)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    exec(compile(source.replace(old, new), spec.origin, "exec"), module.__dict__)
    parent, _, child = module_name.rpartition(".")
    setattr(sys.modules[parent], child, module)


def caught(name: str, suite: str, timeout_s: float = 300.0) -> bool:
    """Return whether a suite fails on a mutant. A suite that hangs counts as failed."""
    command = [sys.executable, "-m", "tests.core.mutants", name, suite]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return True
    assert done.returncode in (0, 1), done.stdout.decode() + done.stderr.decode()
    return done.returncode == 1


def main(arguments: list[str]) -> int:
    """Run one suite on one mutant, or print a table of all. With ``--quick`` a mutant needs one failing suite."""
    if arguments and arguments[0] != "--quick":
        import pytest

        name, suite = arguments
        mutate(name)
        files = [str(HERE / file) for file in SUITES[suite]]
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]))
    holes = 0
    sys.stdout.write(f"{'mutant':44} {'  '.join(SUITES)}\n")
    for name in MUTANTS:
        marks: dict[str, str] = {}
        for suite in SUITES:
            enough = bool(arguments) and "x" in marks.values()
            marks[suite] = " " if enough else "x" if caught(name, suite) else "-"
        holes += "x" not in marks.values()
        sys.stdout.write(f"{name:44} {'  '.join(mark.ljust(len(suite)) for suite, mark in marks.items())}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(MUTANTS)} mutants, {holes} not caught\n")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
