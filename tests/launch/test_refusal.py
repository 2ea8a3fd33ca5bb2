"""A launcher whose settings are refused tells the launchers that wait for it."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

from tests.launch.conftest import Job, Start, Unread
from tests.ports import free_port
from ttp.launch import refusal

REFUSED = "TTP_KEEP='many' is not valid"


def start_hosts(start: Start, environ: dict[str, str], folder: Path, wrong: str, *flags: str) -> list[Job]:
    """Start three launchers. Host ``a`` runs the rendezvous, and host ``wrong`` has an invalid setting."""
    endpoint = f"127.0.0.1:{free_port()}"
    environ |= {"TTP_PORT": str(free_port()), "TTP_TOKEN": "secret"}
    common = ["--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", endpoint, *flags]
    jobs = []
    for host in ("a", "b", "c"):
        environ |= {"TTP_HOST": host, "TTP_RUN_DIR": str(folder / host), "TTP_KEEP": "many" if host == wrong else "3"}
        keeps = ["--rdzv-conf", f"is_host={int(host == 'a')}"]
        jobs.append(start("ttp-run", [*common, *keeps], "env_worker.py", "0", name=host))
    return jobs


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_all_hosts_leave_with_the_reason_of_the_one_that_was_refused(
    start: Start, environ: dict[str, str], tmp_path: Path, wrong: str
) -> None:
    """Also if the refused host runs the rendezvous."""
    jobs = start_hosts(start, environ, tmp_path, wrong)
    assert [job.finish() for job in jobs] == [64, 64, 64], "\n".join(job.log for job in jobs)
    for job in jobs:
        assert job.log.count(REFUSED) == 1 and "Traceback" not in job.log, job.log
        if job.log_path.stem != wrong:
            assert f"host {wrong} is refused" in job.log


def test_a_job_that_has_formed_is_left_alone(start: Start, environ: dict[str, str], tmp_path: Path) -> None:
    """A third launcher with an invalid setting comes to a job of two."""
    endpoint = f"127.0.0.1:{free_port()}"
    environ |= {"TTP_PORT": str(free_port()), "TTP_TOKEN": "secret"}
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", endpoint]
    jobs = []
    for host in ("a", "b"):
        environ |= {"TTP_HOST": host, "TTP_RUN_DIR": str(tmp_path / host)}
        jobs.append(start("ttp-run", flags, "env_worker.py", "0", "wait", name=host))
    assert jobs[0].wait_for("env-0") and jobs[0].wait_for("env-1")
    environ["TTP_KEEP"] = "many"
    refused = start("ttp-run", flags, "env_worker.py", "0", name="c")
    assert refused.finish() == 64 and REFUSED in refused.log
    (jobs[0].out / "go").touch()
    assert [job.finish() for job in jobs] == [0, 0], jobs[0].log + jobs[1].log


def test_the_beats_of_hosts_that_wait_do_not_keep_a_host_from_telling_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beat rewrites the state of the rendezvous; here one comes whenever torch records what it is about to do."""
    endpoint = f"127.0.0.1:{free_port()}"
    parameters = RendezvousParameters("c10d", endpoint, "job", 2, 2, is_host="1")
    backend, store = create_backend(parameters)
    waiting: Any = dynamic_rendezvous.create_handler(store, backend, parameters)
    holder = waiting._state_holder

    def beat(*_: object, **__: object) -> None:
        while True:
            holder.state.last_heartbeats[waiting._this_node] = datetime.now(timezone.utc)
            holder.mark_dirty()
            if holder.sync():
                return

    beat()
    monkeypatch.setattr(dynamic_rendezvous._DistributedRendezvousOpExecutor, "_record", beat)
    flags = SimpleNamespace(rdzv_backend="c10d", rdzv_endpoint=endpoint, rdzv_id="job", local_addr=None)
    flags.rdzv_conf = "is_host=0,close_timeout=1"
    refusal.tell(flags, 1, "refused")
    beat()
    assert holder.state.closed and refusal.heard(waiting) == "refused"


def test_the_others_are_told_if_nobody_reads_the_launchers_output(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(refusal, "_tell", lambda flags, hosts, text, ends: told.append(text))
    with monkeypatch.context() as gone:
        gone.setattr(sys, "stderr", Unread())
        refusal.tell(SimpleNamespace(rdzv_backend="c10d", rdzv_endpoint="here:1"), 2, "refused")
    assert told == ["refused"]
