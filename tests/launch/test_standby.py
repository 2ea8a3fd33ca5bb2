"""Standby controllers, as ranks start them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch import standby


def test_one_that_cannot_be_asked_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold a port, and nobody would know of it. Certificates cannot be read while they are renewed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**_: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[0]

    def ask(*_: Any) -> bool:
        raise ConfigError("TTP_TLS_CERT cannot be read")

    monkeypatch.setattr(standby, "start_controller", start)
    monkeypatch.setattr(standby, "wait_until_serving", ask)
    try:
        with pytest.raises(ConfigError, match="cannot be read"):
            standby.start_standby(Config(token="secret"), tmp_path, "127.0.0.1", "")
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].wait()
