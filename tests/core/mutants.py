"""Breaks the core on purpose in many ways, and finds out which tests notice.

The changes are in ``mutants.txt``. ``python -m tests.core.mutants`` prints which suites notice each (``--quick``: until
the first does; names of mutants: only these). A mutant that no suite catches is a hole in the tests.

The tests are collected once. Each mutant is then a fork in which the changed functions get other code, and which runs
the tests that run the changed statement, the shortest first.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PATIENCE_S = 60
"""A test that takes more processor time does not end."""
MEMORY_BYTES = 4 << 30
PROCESSES = len(os.sched_getaffinity(0))
Items = list[pytest.Item]
NOTICED, ENDLESS, MISSED, NOT_RUN = "x", "endless", "-", "not run"


def _read(text: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Return for each mutant its module, the original text, and the text that replaces it."""
    for entry in text.split("\n\n")[1:]:
        head, *lines = entry.strip("\n").splitlines()
        name, _, module = head.rpartition(": ")
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        yield name, (module, old, new)


MUTANTS = dict(_read((HERE / "mutants.txt").read_text()))


def _suites() -> dict[str, list[Path]]:
    """Return the test files of each suite: those that explore worlds, those that simulate jobs, and all others."""
    files = sorted(path for path in HERE.glob("test_*.py") if path.name != "test_mutants.py")
    model = [path for path in files if path.name.startswith("test_model_")]
    simulation = [path for path in files if path.name.startswith("test_simulat")]
    tables = [path for path in files if path not in (*model, *simulation)]
    gate = [ROOT / f"tests/processor/test_{name}.py" for name in ("gate", "freeze_answers", "device_answers")]
    return {"tables": [*tables, *gate], "model": model, "simulation": simulation}


@functools.cache
def _source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def _mutated(name: str) -> str:
    module, old, new = MUTANTS[name]
    return _source(module).replace(old, new)


def _line(name: str) -> int:
    """Return the first line that a mutant changes."""
    pairs = zip(_source(MUTANTS[name][0]).splitlines(), _mutated(name).splitlines(), strict=False)
    return next(number for number, (line, other) in enumerate(pairs, 1) if line != other)


def _marked(module: str, names: list[str]) -> ast.Module:
    """Return a module in which each statement that a mutant changes follows a call of ``_ran`` with its name."""
    tree = ast.parse(_source(module))
    bodies = [getattr(node, part, []) for node in ast.walk(tree) for part in ("body", "orelse", "finalbody")]
    statements = [(body, each) for body in bodies if isinstance(body, list) for each in body]
    for name in names:
        line = _line(name)
        around = [(body, each) for body, each in statements if each.lineno <= line <= each.end_lineno]
        body, changed = min(around, key=lambda found: found[1].end_lineno - found[1].lineno)
        body.insert(body.index(changed), ast.copy_location(ast.parse(f"_ran({name!r})").body[0], changed))
    return ast.fix_missing_locations(tree)


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [value for value in code.co_consts if isinstance(value, types.CodeType)]


def _shape(code: types.CodeType) -> object:
    """Return what a code object does, whatever its lines are."""
    values = tuple(_shape(value) if isinstance(value, types.CodeType) else repr(value) for value in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, values


def _differences(old: types.CodeType, new: types.CodeType) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """Yield the code of functions that is not the same in two versions of a module."""
    for before, after in zip(_inner(old), _inner(new), strict=True):
        if before.co_flags & inspect.CO_NEWLOCALS and _shape(before) != _shape(after):
            yield before, after
        elif not before.co_flags & inspect.CO_NEWLOCALS:  # the body of a class
            yield from _differences(before, after)


def _outside(text: str) -> str:
    """Return what a module does beside the code of its functions: constants, defaults, decorators, attributes."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = []
    return ast.dump(tree)


def _place(code: types.CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_name, code.co_firstlineno


def _patch(module: str, tree: ast.Module | str) -> None:
    """Give the functions of a module that differ in a changed version of it the code of that version."""
    path = str(inspect.getsourcefile(importlib.import_module(module)))
    versions = [compile(text, path, "exec", dont_inherit=True) for text in (_source(module), tree)]
    changed = {_place(before): after for before, after in _differences(*versions)}
    assert changed, f"no function of {module} is another one"
    functions = [known for known in gc.get_objects() if type(known) is types.FunctionType]
    for function in functions:
        if (code := changed.get(_place(function.__code__))) is not None:
            function.__code__ = code


def apply(module: str, text: str) -> None:
    """Put a mutant in the place of a module that others have imported already. What only an import does is refused."""
    assert _outside(text) == _outside(_source(module)), f"it changes {module} outside of functions"
    _patch(module, text)


@dataclass(eq=False)
class Campaign:
    """Runs tests on mutants, in the place of pytest's own loop over the tests that it has collected."""

    names: list[str]
    quick: bool
    marks: dict[str, dict[str, str]] = field(default_factory=dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Have hypothesis neither shrink nor keep what fails, before the files of tests are imported."""
        from hypothesis import Phase, settings  # pytest wants to import it first

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.get_profile("ttp"), phases=phases, database=None)
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try each mutant on one suite after the other."""
        assert not session.testsfailed, "a file of tests cannot be imported"
        gc.unfreeze()  # what is frozen is not among the objects
        self.marks = {name: {} for name in self.names}
        for suite, files in _suites().items():
            left = [name for name in self.names if not (self.quick and self.noticed(name))]
            if left:
                items = [item for item in session.items if item.path in files]
                self._try_all(suite, session, left, _who_runs(session, items, left))
        return True

    def noticed(self, name: str) -> bool:
        """Return whether a suite has failed on a mutant, or did not end."""
        return bool({NOTICED, ENDLESS} & set(self.marks[name].values()))

    def _try_all(self, suite: str, session: pytest.Session, names: list[str], who: Mapping[str, Items]) -> None:
        """Run a suite on each mutant, in as many processes as there are processors, and print what it says."""
        waiting, running = list(reversed(names)), dict[int, str]()
        while waiting or running:
            while waiting and len(running) < PROCESSES:
                name = waiting.pop()
                running[_fork(functools.partial(_run_mutant, session, who[name], name))] = name
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            assert code in {0, 1} or code == -signal.SIGXCPU, f"the run of {running[pid]!r} ended with {code}"
            name = running.pop(pid)
            mark = NOTICED if code == 1 else ENDLESS if code else MISSED if who[name] else NOT_RUN
            self.marks[name][suite] = mark
            sys.stdout.write(f"{suite:11} {mark:8} {name}\n")
            sys.stdout.flush()


def _fork(work: Callable[[], bool]) -> int:
    """Do something in a process of its own, which says nothing and exits with 1 if ``work`` returns False."""
    if pid := os.fork():
        return pid
    code = 2
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        code = 0 if work() else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(session: pytest.Session, items: Items, after: Callable[[pytest.Item], object] = id) -> bool:
    """Run tests until one fails; return whether none has."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for item, following in zip(items, [*items[1:], None], strict=False):
        soft = int(time.process_time()) + PATIENCE_S
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
        after(item)
    return True


def _run_mutant(session: pytest.Session, items: Items, name: str) -> bool:
    apply(MUTANTS[name][0], _mutated(name))
    return _run(session, items)


def _who_runs(session: pytest.Session, items: Items, names: list[str]) -> dict[str, Items]:
    """Return for each mutant the tests that run the statement that it changes, the quickest first."""
    shares = [items[first::PROCESSES] for first in range(PROCESSES)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in shares]
        pids = [_fork(functools.partial(_watch, session, *told, names)) for told in zip(shares, files, strict=True)]
        assert not any(os.waitpid(pid, 0)[1] for pid in pids), "a test fails without a mutant"
        runs: list[tuple[float, list[str], pytest.Item]] = []
        for share, file in zip(shares, files, strict=True):
            file.seek(0)
            for item, line in zip(share, file, strict=True):
                cpu_s, ran = json.loads(line)
                runs.append((cpu_s, ran, item))
    runs.sort(key=lambda run: run[0])
    return {name: [item for _, ran, item in runs if name in ran] for name in names}


def _watch(session: pytest.Session, items: Items, told: TextIO, names: list[str]) -> bool:
    """Write for each test the processor time that it takes and the mutants whose statements it runs."""
    ran: set[str] = set()
    began = time.process_time()

    def tell(_item: pytest.Item) -> None:
        nonlocal began
        told.write(json.dumps([time.process_time() - began, sorted(ran)]) + "\n")
        told.flush()
        ran.clear()
        began = time.process_time()

    modules = {MUTANTS[name][0] for name in names}
    for module in modules:
        vars(importlib.import_module(module))["_ran"] = ran.add
        _patch(module, _marked(module, [name for name in names if MUTANTS[name][0] == module]))
    return _run(session, items, tell)


def main(arguments: list[str]) -> int:
    """Try the mutants that are named, or all, and print what each suite says."""
    names = [name for name in arguments if name != "--quick"] or list(MUTANTS)
    if unknown := [name for name in names if name not in MUTANTS]:
        sys.exit(f"mutants.txt has none of these names: {unknown}")
    campaign = Campaign(names, "--quick" in arguments)
    files = [str(path) for files in _suites().values() for path in files]
    options = "-qq -s -o faulthandler_timeout=0 -p no:cacheprovider -p no:xdist"
    if code := pytest.main([*options.split(), *files], plugins=[campaign]):
        return int(code)
    holes = [name for name in names if not campaign.noticed(name)]
    sys.stdout.write(f"{len(names)} mutants, {len(holes)} not caught\n" + "".join(f"  {name}\n" for name in holes))
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
