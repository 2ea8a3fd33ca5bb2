"""``mindio_ttp`` becomes importable only on request, once, and never in place of the original."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import PYTHON_BIN
from ttp.compat.mindio import placing

SHOW = "import mindio_ttp; print(getattr(mindio_ttp, 'ORIGIN', mindio_ttp.__name__))"
LEGACY = "from mindio_ttp.framework_ttp import ttp_init_controller as f; print(f.__module__)"


def _python(code: str, *, original: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")}
    if original is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(original), clean.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def original(tmp_path: Path) -> Path:
    package = tmp_path / "vendor" / "mindio_ttp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("ORIGIN = 'the original'\n")
    return package.parent


def test_nobody_gets_it_unasked() -> None:
    assert "No module named 'mindio_ttp'" in _python("import ttp; import mindio_ttp").stderr


def test_an_import_puts_it_into_place_as_one_module_in_children_too() -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}])"
    both = (
        "import mindio_ttp.utils, ttp.compat.mindio as ours; print(mindio_ttp.utils is ours.utils, mindio_ttp is ours)"
    )
    done = _python(f"import ttp.compat.mindio; {SHOW}; {child}; {both}")
    assert sorted(done.stdout.split()) == ["True"] * 2 + ["ttp.compat.mindio"] * 2, done.stderr


def test_a_module_of_older_packages_that_is_missing_says_what_to_use() -> None:
    """MindSpeed-LLM before 2.3 imports it, and says itself only that mindio_ttp is not installed."""
    said = _python("import ttp.compat.mindio; import mindio_ttp.adaptor.utils").stderr
    assert "No module named 'mindio_ttp.adaptor'" in said and "use MindSpeed-LLM from 2.3.0 on" in said


def test_the_original_wins_and_a_warning_says_so(original: Path) -> None:
    done = _python(f"import ttp.compat.mindio; {SHOW}", original=original)
    assert done.stdout.strip() == "the original"
    assert "is installed" in done.stderr and "TTP_MINDIO=force" in done.stderr


def test_another_copy_of_ttp_is_no_original(tmp_path: Path) -> None:
    """A parent process with another copy leaves its folder in PYTHONPATH: the stubs imported each other for ever."""
    stub = Path(placing.ON_PATH, "mindio_ttp", "__init__.py")
    other = tmp_path / "ttp" / "compat" / "on_path"
    shutil.copytree(stub.parent, other / "mindio_ttp")
    done = _python(SHOW, original=other)
    assert done.stdout.strip() == "ttp.compat.mindio", done.stderr


def test_unless_asked_otherwise(original: Path) -> None:
    done = _python(f"import ttp.compat.mindio; {SHOW}", original=original, TTP_MINDIO="force")
    assert done.stdout.strip() == "ttp.compat.mindio", done.stderr


def test_an_original_that_is_loaded_cannot_be_replaced(original: Path) -> None:
    done = _python("import mindio_ttp, ttp.compat.mindio", original=original, TTP_MINDIO="force")
    assert "is imported already" in done.stderr


def test_the_originals_settings_are_no_misspelt_ones_of_ours() -> None:
    code = "from ttp.config import Config; Config.from_env()"
    assert "unknown environment variable TTP_LOG_PATH" in _python(code, TTP_LOG_PATH="/var/log").stderr
    assert _python(code, TTP_LOG_PATH="/var/log", TTP_MINDIO="1").returncode == 0


@pytest.mark.parametrize("how", [["--mindio"], pytest.param([], marks=pytest.mark.slow)])
def test_ttp_run_gives_it_to_its_workers(tmp_path: Path, how: list[str]) -> None:
    script = tmp_path / "worker.py"
    script.write_text(LEGACY + "\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | ({} if how else {"TTP_MINDIO": "1"})
    command = [str(PYTHON_BIN / "ttp"), "run", *how, "--standalone", "--nproc-per-node", "1", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "ttp.legacy" in done.stdout, done.stdout + done.stderr
