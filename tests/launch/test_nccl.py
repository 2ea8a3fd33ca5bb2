"""NCCL's settings: which are exported, which are refused, and which cause only a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch import nccl
from ttp.launch.nccl import HANDLING, HEARTBEAT, TO_GO_ON, heartbeat_s, objections, settings, why_not_go_on

CONFIG = Config(port=1)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x"}
MODERN = {HANDLING: "0", HEARTBEAT: "600"}


@pytest.mark.parametrize(
    ("environ", "launcher", "exported"),
    [
        ({}, None, {HANDLING: "0", HEARTBEAT: "635"}),
        ({HANDLING: "2"}, None, {HEARTBEAT: "635"}),
        ({HANDLING: "1"}, None, {HEARTBEAT: "635"}),  # without torchrun somebody has set it
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, None, {HEARTBEAT: "635"}),
        ({HEARTBEAT: "30"}, None, {HANDLING: "0"}),
        (TORCHRUN | {HANDLING: "1"}, {}, {HANDLING: "0", HEARTBEAT: "635"}),
        (TORCHRUN | {HANDLING: "1"}, None, {HANDLING: "0", HEARTBEAT: "635"}),
        (TORCHRUN | {HANDLING: "1"}, {HANDLING: "1"}, {HEARTBEAT: "635"}),
        (TORCHRUN | {HANDLING: "3"}, {}, {HEARTBEAT: "635"}),
        (MODERN, None, {}),
    ],
)
def test_what_is_exported(environ: dict[str, str], launcher: dict[str, str] | None, exported: dict[str, str]) -> None:
    assert settings(environ, CONFIG, launcher) == exported


@pytest.mark.parametrize(
    ("environ", "launcher", "words", "on_purpose"),
    [
        ({}, None, "without TORCH_NCCL_ASYNC_ERROR_HANDLING=0 .* end this process", False),
        ({HANDLING: "1"}, None, "_HANDLING=1 .* abort .* end this process .* export .*=0", True),
        ({HANDLING: "2"}, None, "_HANDLING=2 .* abort", True),
        ({HANDLING: "3"}, None, "_HANDLING=3 .* end this process", True),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, None, "with NCCL_ASYNC_ERROR_HANDLING=1", True),
        (TORCHRUN | {HANDLING: "1"}, {}, "_HANDLING=1 .* abort", False),
        (TORCHRUN | {HANDLING: "1"}, None, "_HANDLING=1 .* abort", False),
        (TORCHRUN | {HANDLING: "1"}, {HANDLING: "1"}, "_HANDLING=1 .* abort", True),
        (TORCHRUN | {HANDLING: "3"}, {}, "_HANDLING=3", True),
        (MODERN | {"TORCH_NCCL_DESYNC_DEBUG": "1"}, None, "TORCH_NCCL_DESYNC_DEBUG=1 turns .*=0 into 3", True),
        (MODERN | {"NCCL_DESYNC_DEBUG": "true"}, None, "NCCL_DESYNC_DEBUG=true turns", True),
        (MODERN | {"TORCH_DISTRIBUTED_DEBUG": "detail"}, None, "TORCH_DISTRIBUTED_DEBUG=detail turns", True),
        (MODERN | {HEARTBEAT: "359"}, None, "359 s after a failure.* TTP_OT=360 s: export .*=635", True),
    ],
)
def test_what_defeats_a_save(
    environ: dict[str, str], launcher: dict[str, str] | None, words: str, on_purpose: bool
) -> None:
    (found,) = objections(environ, CONFIG, launcher)
    assert found.on_purpose is on_purpose
    assert re.search(words, found.text), found.text


@pytest.mark.parametrize(
    "environ",
    [
        MODERN,
        {HANDLING: "0"},  # torch's 480 s outlast the 360 s of TTP_OT
        {"NCCL_ASYNC_ERROR_HANDLING": "0"},
        {HANDLING: "0", "NCCL_ASYNC_ERROR_HANDLING": "1"},  # the new name counts
        MODERN | {HEARTBEAT: "360"},
        MODERN | {HEARTBEAT: "5", "TORCH_NCCL_ENABLE_MONITORING": "0"},
        MODERN | {"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_NCCL_DESYNC_DEBUG": "0"},
        {HANDLING: "1", "TORCH_NCCL_BLOCKING_WAIT": "1"},
        {"NCCL_BLOCKING_WAIT": "1"},
        MODERN | {"TORCH_NCCL_PROPAGATE_ERROR": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
    ],
)
def test_what_leaves_a_save_alone(environ: dict[str, str]) -> None:
    assert objections(environ, CONFIG) == []


def test_the_monitor_outlasts_any_rescue() -> None:
    """The heartbeat timeout is torch's default or longer, also with a long TTP_OT and without hang detection."""
    assert heartbeat_s(Config(rescue_patience_s=10, hang_s=None)) == 480
    assert heartbeat_s(Config(rescue_patience_s=3600, hang_s=None)) == 3600 + 30 + 5 + 60
    assert heartbeat_s(Config(rescue_patience_s=3600, hang_s=100)) == 3600 + 30 + 5 + 60 + 300
    (late,) = objections({HANDLING: "0"}, Config(rescue_patience_s=3600))
    assert not late.on_purpose and "480 s" in late.text


@pytest.mark.parametrize("config", [CONFIG, Config(rescue_patience_s=5000), Config(hang_s=None)])
@pytest.mark.parametrize("environ", [{}, TORCHRUN | {HANDLING: "1"}])
def test_nothing_is_left_to_object_to(environ: dict[str, str], config: Config) -> None:
    assert objections(environ | settings(environ, config), config) == []


class TestGoingOn:
    """Settings that ``TTP_CONTINUITY=keep`` needs on a device, in addition to those for a save."""

    keeps = Config(port=1, continuity="keep", keep_cuda=True)
    all = MODERN | dict.fromkeys(TO_GO_ON, "0")

    def test_what_is_exported(self) -> None:
        assert settings({}, self.keeps) == {HANDLING: "0", HEARTBEAT: "665"} | dict.fromkeys(TO_GO_ON, "0")
        assert settings({"NCCL_NVLS_ENABLE": "2"}, self.keeps).keys() == {HANDLING, HEARTBEAT, *TO_GO_ON} - {
            "NCCL_NVLS_ENABLE"
        }

    @pytest.mark.parametrize("config", [Config(port=1, continuity="keep"), Config(port=1, keep_cuda=True)])
    def test_nothing_more_where_it_is_not_switched_on(self, config: Config) -> None:
        assert settings({}, config) == {HANDLING: "0", HEARTBEAT: "635"}

    @pytest.mark.parametrize("torchrun", [{}, TORCHRUN | {HANDLING: "1"}])
    def test_nothing_is_left_to_object_to(self, torchrun: dict[str, str]) -> None:
        assert why_not_go_on(torchrun | settings(torchrun, self.keeps), self.keeps) == []

    @pytest.mark.parametrize(
        ("environ", "words"),
        [
            ({HANDLING: "1"}, "_HANDLING=1 .* abort"),
            ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, "TORCH_NCCL_DESYNC_DEBUG=1 turns"),
            ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}, "with TORCH_NCCL_RETHROW_CUDA_ERRORS=1 .* watchdog"),
            ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": None}, "without TORCH_NCCL_RETHROW_CUDA_ERRORS=0 "),  # torch's default
            ({"TORCH_NCCL_PROPAGATE_ERROR": "true"}, "with TORCH_NCCL_PROPAGATE_ERROR=true "),
            ({"NCCL_NVLS_ENABLE": "2"}, "with NCCL_NVLS_ENABLE=2 .* SHARP"),
            ({"NCCL_NVLS_ENABLE": None}, "without NCCL_NVLS_ENABLE=0 .* SHARP"),
            ({"TORCH_DIST_USE_NCCL2": "1"}, "with TORCH_DIST_USE_NCCL2=1 .* cannot exchange"),
            ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT=1 the host waits"),
            ({HEARTBEAT: "380"}, "TIMEOUT_SEC=380 .* 390 s of going on"),
        ],
    )
    def test_what_defeats_it(self, environ: dict[str, str | None], words: str) -> None:
        merged = self.all | environ
        (found,) = why_not_go_on({k: v for k, v in merged.items() if v is not None}, self.keeps)
        assert re.search(words, found), found

    @pytest.mark.parametrize(
        "environ",
        [
            {"TORCH_NCCL_PROPAGATE_ERROR": None},
            {"TORCH_DIST_USE_NCCL2": None},  # no torch before 2.15 has it
            {HEARTBEAT: "5", "TORCH_NCCL_ENABLE_MONITORING": "0"},
        ],
    )
    def test_what_leaves_it_alone(self, environ: dict[str, str | None]) -> None:
        merged = self.all | environ
        config = Config(port=1, continuity="keep", keep_cuda=True, rescue_patience_s=4, continue_s=1)
        assert why_not_go_on({k: v for k, v in merged.items() if v is not None}, config) == []


class TestLauncher:
    """Whose environment shows whether torchrun was given a setting."""

    @staticmethod
    def ancestor(proc: Path, pid: int, parent: int, **environ: str) -> None:
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "environ").write_text("".join(f"{name}={value}\0" for name, value in environ.items()))
        (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) S {parent} 1 1")

    def test_the_parent(self, tmp_path: Path) -> None:
        self.ancestor(tmp_path, os.getppid(), 1, HOME="/x=y", **{HANDLING: "1"})
        assert nccl.launcher_environ(tmp_path) == {"HOME": "/x=y", HANDLING: "1"}

    def test_a_shell_between_torchrun_and_its_worker_has_torchruns_value(self, tmp_path: Path) -> None:
        self.ancestor(tmp_path, os.getppid(), 2**22 + 1, TORCHELASTIC_RUN_ID="x", **{HANDLING: "1"})
        self.ancestor(tmp_path, 2**22 + 1, 1, HOME="/")
        assert nccl.launcher_environ(tmp_path) == {"HOME": "/"}

    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        assert nccl.launcher_environ(tmp_path) is None
        self.ancestor(tmp_path, os.getppid(), os.getppid(), TORCHELASTIC_RUN_ID="x")
        assert nccl.launcher_environ(tmp_path) is None

    def test_the_real_one(self) -> None:
        assert "PATH" in (nccl.launcher_environ() or {"PATH": ""})


class TestCheck:
    """The check in ``wrap_optimizer``, with fake process groups."""

    @pytest.fixture(autouse=True)
    def _environ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = {k: v for k, v in os.environ.items() if "NCCL" not in k and not k.startswith("TORCH")}
        monkeypatch.setattr(os, "environ", kept)

    @staticmethod
    def groups(monkeypatch: pytest.MonkeyPatch, *backends: str) -> None:
        world = types.SimpleNamespace(pg_map=dict.fromkeys(backends))
        library: Any = types.SimpleNamespace(
            is_initialized=lambda: bool(backends),
            distributed_c10d=types.SimpleNamespace(_world=world),
            get_backend_config=lambda group: group,
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", library)

    @pytest.mark.parametrize("backends", [(), ("cpu:gloo",), ("cpu:gloo,cuda:gloo", "cpu:mpi")])
    def test_without_nccl_nothing_matters(self, monkeypatch: pytest.MonkeyPatch, backends: tuple[str, ...]) -> None:
        os.environ[HANDLING] = "1"
        self.groups(monkeypatch, *backends)
        nccl.check(CONFIG)

    @pytest.mark.parametrize("backends", [("cuda:nccl",), ("cpu:gloo,cuda:nccl",), ("cpu:gloo", "cuda:nccl")])
    def test_what_was_set_on_purpose_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, backends: tuple[str, ...]
    ) -> None:
        os.environ[HANDLING] = "2"
        self.groups(monkeypatch, *backends)
        with pytest.raises(ConfigError, match=r"HANDLING=2 .* export TORCH_NCCL_ASYNC_ERROR_HANDLING=0"):
            nccl.check(CONFIG)

    def test_a_default_is_told(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.groups(monkeypatch, "cuda:nccl")
        nccl.check(CONFIG)
        (told,) = caplog.records
        assert "were made before ttp was imported" in told.getMessage() and told.levelname == "WARNING"

    def test_what_was_exported_is_silent(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        os.environ.update(TTP_PORT="1234")
        nccl.prepare()
        self.groups(monkeypatch, "cuda:nccl")
        nccl.check(CONFIG)
        assert not caplog.records

    def test_a_group_that_exists_has_read_its_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups(monkeypatch, "cuda:nccl")
        os.environ.update(TTP_PORT="1234")
        nccl.prepare()
        assert HANDLING not in os.environ

    def test_wrong_settings_are_said_elsewhere(self) -> None:
        os.environ.update(TTP_PORT="nonsense")
        nccl.prepare()
        assert HANDLING not in os.environ


@pytest.mark.parametrize(("port", "seen"), [("1234", "0"), ("", "None")])
def test_importing_ttp_is_early_enough(port: str, seen: str) -> None:
    clean = {k: v for k, v in os.environ.items() if "NCCL" not in k and not k.startswith("TTP_")}
    code = f"import os, ttp; print(os.environ.get({HANDLING!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | {"TTP_PORT": port}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == seen


def test_real_groups_of_another_backend(tmp_path: Path) -> None:
    """The names of torch that the check reads exist."""
    pytest.importorskip("torch")
    from torch import distributed

    dist: Any = distributed
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.new_group([0])
        assert nccl._initialized() and not nccl._uses_nccl()
        assert dist.distributed_c10d._world.pg_map
    finally:
        dist.destroy_process_group()
