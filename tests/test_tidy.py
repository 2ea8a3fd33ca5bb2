"""The source keeps its own rules: imports between layers, length of functions and files, contents of the wheel."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("tidy")  # with test_support.py: each file is parsed once

ROOT = Path(__file__).parent.parent
HOMES = {"ttp": ROOT / "ttp", "ttp.controller": ROOT / "controller", "ttp.adapters": ROOT / "adapters"}
FUNCTION_LINES_MAX = 50
CORE_MAY_IMPORT = {
    "__future__", "collections", "contextlib", "dataclasses", "enum", "hashlib", "itertools", "operator",
    "types", "typing",
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Return every module of the package by its import name, without following links."""
    found: dict[str, Path] = {}
    for package, folder in HOMES.items():
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if package == "ttp" and relative.parts[0] in ("controller", "adapters"):
                continue
            parts = relative.with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


MODULES = modules()
OWN = {name: path for name, path in MODULES.items() if not name.startswith("ttp.wire.v1")}


@functools.cache
def nodes_of(name: str) -> list[ast.AST]:
    """Return all nodes of a module's syntax, the module itself first."""
    return list(ast.walk(ast.parse(OWN[name].read_text())))


def body_of(name: str) -> list[ast.stmt]:
    (module, *_) = nodes_of(name)
    assert isinstance(module, ast.Module)
    return module.body


def imported(name: str) -> set[str]:
    names: set[str] = set()
    for node in nodes_of(name):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_the_core_and_what_extends_it_import_data_modules_and_themselves_only() -> None:
    for name in (name for name in OWN if name.startswith(("ttp.core", "ttp.mindio.protocol"))):
        more = [] if name.startswith("ttp.core") else ["ttp.mindio.protocol"]
        own = ("ttp.core", "ttp.errors", "ttp._version", *more)
        for target in imported(name):
            assert target.startswith(own) or target.partition(".")[0] in CORE_MAY_IMPORT, f"{name} imports {target}"


def test_the_core_does_not_know_who_extends_it() -> None:
    for name, path in OWN.items():
        if name.startswith("ttp.core"):
            found = re.search(r"(?i)mindio|handler|manager", path.read_text())
            assert found is None, f"{name} speaks of {found[0]}"


FLOORS = (
    {"aside", "errors", "inbox", "polling", "_version"},
    {"core", "mindio.protocol"},
    {"store"},
    {"config", "wire", "launch", "processor"},
    {
        "session",
        "restoring",
        "api",
        "update_function",
        "legacy",
        "ttp",
        "controller",
        "mindspore_files",
        "testing",
        "mindio",
        "chaos",
    },
    {"adapters", "cli", "compat", "__main__", "accelerate", "deepspeed", "hf", "lightning", "titan", "ray", "web"},
)
"""The rooms of the house, the lowest first: what is imported is of the same floor or of a lower one."""
UPWARDS = {("launch", "compat")}
"""``ttp run --mindspore --mindio`` puts the names of MindIO in place."""


def floor_of(module: str) -> tuple[int, str]:
    room = "mindio.protocol" if module.startswith("ttp.mindio.protocol") else [*module.split("."), "ttp"][1]
    return next((floor, room) for floor, rooms in enumerate(FLOORS) if room in rooms)


def imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    """Return what a module imports when it is imported: not in functions, and not for type checkers only."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try)) and "TYPE_CHECKING" not in ast.unparse(node).partition(":")[0]:
            yield from imported_at_once(node.body)


def test_nothing_is_imported_from_a_floor_above() -> None:
    for name in OWN:
        floor, room = floor_of(name)
        for target in imported_at_once(body_of(name)):
            if (target.split(".")[0] == "ttp" and target in MODULES) or target.rpartition(".")[0] in MODULES:
                above, other = floor_of(target if target in MODULES else target.rpartition(".")[0])
                assert above <= floor or (room, other) in UPWARDS, f"{name} imports {target}"


OF_NO_START = {"ttp.chaos", "ttp.compat", "ttp.mindspore_files", "ttp.testing", "ttp.web", "prometheus_client"}
STARTS = {
    "a rank": (
        {"ttp.api", "ttp.launch.admission", "ttp.processor.processor", "ttp.restoring", "ttp.adapters.torch.adapter"},
        {"rich", "typer", "ttp.adapters.torch.convert", "ttp.cli", "ttp.controller", "ttp.core.controller",
         "ttp.launch.agent", "ttp.launch.host", "ttp.launch.relay"},
    ),
    "a controller": (
        {"ttp.controller.__main__"},
        {"msgpack", "rich", "torch", "typer", "ttp.adapters", "ttp.cli", "ttp.controller.metrics", "ttp.core.rank",
         "ttp.launch.agent", "ttp.launch.host", "ttp.launch.relay", "ttp.processor"},
    ),
    "a launcher": (
        {"ttp.launch.run", "ttp.launch.plugin", "ttp.launch.agent", "ttp.launch.install"},
        {"msgpack", "rich", "typer", "ttp.adapters", "ttp.cli", "ttp.controller", "ttp.core.controller.machine",
         "ttp.core.rank", "ttp.launch.relay", "ttp.mindio", "ttp.processor.processor"},
    ),
    "a command": (
        {"ttp.cli.main", "ttp.cli.status"},
        {"google", "grpc", "msgpack", "torch", "ttp.controller", "ttp.core.messages", "ttp.processor"},
    ),
}  # fmt: skip
"""What a process imports when it starts, and what it must not import: nobody waits for what it does not need."""


@pytest.mark.parametrize("process", STARTS)
def test_a_process_imports_when_it_starts_what_it_needs(process: str) -> None:
    first, never = STARTS[process]
    because = dict.fromkeys(first, process)
    todo = list(first)
    while todo:
        name = todo.pop()
        for target in [name.rpartition(".")[0], *(imported_at_once(body_of(name)) if name in OWN else ())]:
            home = target.rpartition(".")[0]
            found = home if home in MODULES and target not in MODULES else target
            if found and found not in because:
                because[found] = name
                todo.append(found)
    parts = {".".join(found.split(".")[:n]): found for found in because for n in range(1, found.count(".") + 2)}
    assert {part: because[parts[part]] for part in (never | OF_NO_START) & parts.keys()} == {}


def test_a_wait_with_a_limit_ends() -> None:
    """See ``ttp.inbox``."""
    for name, path in OWN.items():
        source = path.read_text()
        assert not ("SimpleQueue(" in source and ".get(timeout" in source), f"{name} needs an Inbox"


def test_frameworks_are_imported_in_adapters_and_the_launcher_only() -> None:
    for name in OWN:
        if name.startswith(("ttp.adapters", "ttp.launch", "ttp.mindspore_files", "ttp.store.arrays", "ttp.chaos.job")):
            continue
        top = [n for n in body_of(name) if isinstance(n, (ast.Import, ast.ImportFrom))]
        for node in top:
            targets = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(t.partition(".")[0] in ("torch", "mindspore", "numpy") for t in targets), name


def test_import_ttp_is_light() -> None:
    heavy = ("torch", "mindspore", "grpc", "numpy", "google.protobuf")
    code = f"import sys, ttp; print([m for m in {heavy!r} if m in sys.modules])"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_had() -> None:
    import ttp

    for name in ttp.__all__:
        assert getattr(ttp, name) is not None


def test_functions_fit_a_screen() -> None:
    long = []
    for name in OWN:
        for node in nodes_of(name):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                docstring = ast.get_docstring(node, clean=False)
                lines = node.end_lineno - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
                if lines > FUNCTION_LINES_MAX:
                    long.append(f"{name}.{node.name}: {lines} lines")
    assert not long


FILE_LINES_MAX = 400


def test_files_have_one_subject() -> None:
    paths = {*OWN.values(), *(ROOT / "tests").rglob("*.py")}
    lines = {str(path): len(path.read_text().splitlines()) for path in paths}
    assert not {name: count for name, count in lines.items() if count > FILE_LINES_MAX}


def test_nothing_unpickles_on_load() -> None:
    for name in OWN:
        for node in nodes_of(name):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), name
            if called == "torch.load":
                safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
                assert safe, f"{name}: {ast.unparse(node)}"


def declared_packages() -> set[str]:
    if sys.version_info >= (3, 11):
        import tomllib

        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
        return set(settings["tool"]["setuptools"]["packages"])
    text = (ROOT / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0]
    return {line.strip().strip('",') for line in text.splitlines() if line.strip()}


def test_every_package_on_disk_is_shipped() -> None:
    on_disk = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert declared_packages() == on_disk


@pytest.mark.timeout(300)
def test_the_wheel_holds_the_package_and_nothing_else_and_the_source_distribution_all(tmp_path: Path) -> None:
    """The wheel is built from the source distribution, by the setuptools that is here: nothing is downloaded."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would pack what an earlier build has left
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=280,
    )
    (wheel,) = tmp_path.glob("ttp_ft-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {t for t in top if not t.endswith(".dist-info")} == {"ttp"}
    for needed in (
        "ttp/py.typed",
        "ttp/controller/service.py",
        "ttp/adapters/torch/adapter.py",
        "ttp/wire/v1/controller_pb2.pyi",
        "ttp/web/static/page.html",
        "ttp/web/static/page.css",
        "ttp/web/static/page.js",
    ):
        assert needed in names
    shipped = {n for n in names if n.endswith(".py")}
    assert shipped == {
        name.replace(".", "/") + ("/__init__.py" if p.name == "__init__.py" else ".py") for name, p in MODULES.items()
    }
    (archive,) = tmp_path.glob("ttp_ft-*.tar.gz")
    with tarfile.open(archive) as source:
        there = {name.partition("/")[2] for name in source.getnames()}
    folders = (ROOT / folder for folder in ("benchmarks", "deploy", "docs", "examples", "proto", "tests"))
    files = {path for folder in folders for path in folder.rglob("*.*") if "__pycache__" not in path.parts}
    files |= {ROOT / "noxfile.py", ROOT / "Makefile"}
    wanted = {str(path.relative_to(ROOT)) for path in files if path.is_file()}
    assert not wanted - there and not any(name.endswith(".pyc") for name in there)


def test_the_index_of_decisions_lists_each_record_once() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    listed = re.findall(r"^\| \[([0-9]+)\]\((.+)\) \| (.+) \|$", index, re.MULTILINE)
    for number, file, title in listed:
        assert file.startswith(f"{int(number):04}-"), file
        head = (folder / file).read_text().splitlines()[0]
        assert head == f"# {number}. {title}", (file, head, title)
    records = sorted(path.name for path in folder.glob("0*.md"))
    assert sorted(file for _, file, _ in listed) == records, "docs/decisions/README.md lists other records than exist"
