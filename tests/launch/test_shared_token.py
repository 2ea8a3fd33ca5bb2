"""The token that launchers make and hand to each other through their rendezvous."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.conftest import Start
from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch import shared_token
from ttp.launch.shared_token import SharedToken


@pytest.fixture
def store() -> Any:
    return pytest.importorskip("torch.distributed").HashStore()


def test_the_first_nodes_token_is_everybodys_also_when_another_node_is_the_first(store: Any) -> None:
    nodes = [SharedToken(Config()) for _ in range(3)]
    first = nodes[0].agree(store, first=True)
    assert len(first.token) == 32 and nodes[0].made_here
    assert [node.agree(store, first=False).token for node in nodes[1:]] == [first.token] * 2
    assert nodes[1].agree(store, first=True).token == first.token
    assert nodes[0].agree(store, first=False).token == first.token


def test_what_a_user_has_given_is_not_put_into_the_store(store: Any) -> None:
    given = SharedToken(Config(token="given by hand"))
    assert given.agree(store, first=True).token == "given by hand" and not given.made_here
    assert store.get(shared_token.KEY) == b"given"
    with pytest.raises(ConfigError, match="the first node was given a token, and this one was not"):
        SharedToken(Config()).agree(store, first=False)
    assert SharedToken(Config(token="given by hand")).agree(store, first=False).token == "given by hand"


def test_an_insecure_job_makes_none(store: Any) -> None:
    assert SharedToken(Config(insecure=True)).agree(store, first=True).token == ""
    with pytest.raises(ConfigError, match="TTP_INSECURE=1 is set on the first node and not on this one"):
        SharedToken(Config()).agree(store, first=False)


def test_a_first_node_that_says_nothing_is_not_waited_for_for_ever(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_token, "WAIT_S", 0.05)
    with pytest.raises(ConfigError, match="has not passed on the job's token within"):
        SharedToken(Config()).agree(store, first=False)


def test_ttp_run_and_torchrun_on_two_nodes_have_one_token(
    start: Start, environ: dict[str, str], tmp_path: Path, unused_port: int
) -> None:
    """The token appears in no command line, no log and no file that others can read."""
    from tests.ports import free_port

    environ["TTP_PORT"] = str(free_port())
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{unused_port}"]
    one = start("ttp-run", flags, "env_worker.py", "0", "wait", name="one")
    environ["TTP_RUN_DIR"] = str(tmp_path / "second")
    two = start("torchrun", flags, "env_worker.py", "0", "wait", name="two")
    tokens = {json.loads(one.wait_for(f"env-{rank}"))["TTP_TOKEN"] for rank in (0, 1)}
    (token,) = tokens
    assert len(token) == 32
    for run_dir in (tmp_path / "run", tmp_path / "second"):
        assert (run_dir / "token").read_text().strip() == token
        assert stat.S_IMODE((run_dir / "token").stat().st_mode) == 0o600
        for path in run_dir.rglob("*"):
            assert path.name == "token" or not path.is_file() or token.encode() not in path.read_bytes(), path
    assert token not in " ".join(" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    (one.out / "go").touch()
    assert (one.finish(), two.finish()) == (0, 0), one.log + two.log
    assert token not in one.log + two.log
    assert not (tmp_path / "run" / "token").exists() and not (tmp_path / "second" / "token").exists()


def test_a_mindspore_job_of_two_hosts_without_a_token_is_refused(start: Start, environ: dict[str, str]) -> None:
    environ["TTP_PORT"] = "23456"
    flags = ["--worker-num", "2", "--local-worker-num", "1", "--node-rank", "0", "--master-addr", "192.0.2.1"]
    job = start("ttp-run-mindspore", flags, "env_worker.py", "0")
    assert job.finish() == 64
    assert "has no token that keeps strangers out" in job.log and "TTP_TOKEN_FILE" in job.log
