"""Traces where OpenTelemetry is not installed. ``tests/traces`` checks them with the SDK and a collector."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Ttp
from tests.cli.test_incidents import SAVED, write
from ttp.cli.spans import send
from ttp.errors import ConfigError


def test_without_opentelemetry_it_is_said_what_to_install(
    tmp_path: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    write(tmp_path, "one", SAVED)
    said = ttp("incidents", tmp_path, "--last", "--otlp")
    assert said.code == 64 and "pip install 'ttp-ft[otlp]'" in said.err
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match="pip install 'ttp-ft"):
        send([])
