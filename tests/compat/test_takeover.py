"""A standby controller takes over from a lost one, over TLS too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat.jobs import Job, after
from tests.compat.test_scenarios import KILLED, SAVED
from tests.wire.certificates import Authority

Make = Callable[..., Job]


def _status(port: int, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | settings
    command = [sys.executable, "-m", "ttp", "status", "--port", str(port), "--json"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_rank_zero_dies_in_the_same_moment(job: Make) -> None:
    """The next controller has never been told its replica sets: those of the others hold them."""
    options = {"step_s": 0.05}
    this = job(steps=100_000, options=options, env={"TTP_ADDRESS": "127.0.0.1"}, hosts="abab").start()
    this.until(lambda: this.live_ranks() == 4 and bool(this.status().standbys))
    for controller in this.controllers():
        controller.kill()
    this.processes[0].kill()
    assert this.wait() == [KILLED, SAVED, SAVED, SAVED], this.story()
    (version,) = {notes[-1]["step"] for notes in this.of("save").values()}
    assert {rank: this.part(version, rank)["value"] for rank in this.of("save")} == dict.fromkeys(
        (1, 2), after(version)
    )


@pytest.mark.slow
@pytest.mark.parametrize("revoking", [False, True])
def test_a_standby_takes_over_over_tls(
    job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revoking: bool
) -> None:
    """The controller is killed, then its whole host. The rest is saved, and all traffic is encrypted."""
    authority = Authority(tmp_path / "authority")
    own = authority.sign()
    if revoking:
        own["TTP_TLS_CRL"] = str(authority.revoke())
    for name, value in own.items():
        monkeypatch.setenv(name, value)  # this process asks the controllers too
    options = {"step_s": 0.02, "tls": ""}
    this = job(steps=100_000, options=options, env={**own, "TTP_ADDRESS": "127.0.0.1"}, hosts="aabb").start()
    this.until(lambda: this.live_ranks() == 4 and bool(this.status().standbys))
    standby = int(this.status().standbys[0].rpartition(":")[2])
    for controller in this.controllers():
        controller.kill()
    this.until(lambda: this.live_ranks(standby) == 4)

    done = _status(standby, own)
    assert done.returncode == 0, done.stderr
    assert {rank["host"] for rank in json.loads(done.stdout)["ranks"]} == {"a", "b"}
    assert _status(standby, {}).returncode == 64

    for process in this.processes[:2]:
        process.kill()
    assert this.wait() == [KILLED, KILLED, SAVED, SAVED], this.story()
    (version,) = {notes[-1]["step"] for notes in this.of("save").values()}
    assert {rank: this.part(version, rank)["value"] for rank in (2, 3)} == dict.fromkeys((2, 3), after(version))
