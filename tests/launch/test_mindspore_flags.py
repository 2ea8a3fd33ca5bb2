"""The command line of ``ttp run --mindspore``, and the environment that it gives to processes."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from ttp.errors import ConfigError
from ttp.launch.mindspore.environment import patience, scheduler_environ, worker_environ
from ttp.launch.mindspore.flags import Job, parse
from ttp.launch.run import asks_for_mindspore, run


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a rank table of two hosts with two devices each; the second host is this machine."""
    hosts = {"10.255.255.1": [(0, 0), (1, 1)], "127.0.0.1": [(0, 2), (1, 3)]}
    return Path(write_table(tmp_path / "table.json", hosts))


def job(script: str, *flags: str, environ: dict[str, str] | None = None) -> Job:
    return parse(["--mindspore", *flags, script, "--lr", "1"], environ or {})


@pytest.mark.parametrize(
    "words",
    [
        ["--mindspore", "x.py"],
        ["--nproc-per-node", "2", "--mindspore", "x.py"],
        ["--nproc-per-node=2", "--mindspore", "train"],
        ["--max-restarts=1", "--node_rank", "0", "--mindspore"],
        ["--mindio", "--nnodes", "2", "--mindspore", "x.py"],
    ],
)
def test_it_is_asked_for(words: list[str]) -> None:
    assert asks_for_mindspore(words)


@pytest.mark.parametrize(
    "words",
    [
        ["x.py", "--mindspore"],
        ["--nproc-per-node", "2", "x.py", "--mindspore"],
        ["--standalone", "x.py", "--mindspore"],
        ["--nproc-per-node", "2", "train", "--mindspore"],
        ["-m", "timeit", "--mindspore"],
        ["--no-python", "bash", "--mindspore"],
        ["--mindio", "train", "--mindspore"],
        [],
    ],
)
def test_the_scripts_own_arguments_are_not_ours(words: list[str]) -> None:
    assert not asks_for_mindspore(words)


def test_one_host(script: str) -> None:
    found = job(script, "--nproc-per-node", "3")
    assert (found.world_size, list(found.ranks), found.several_nodes) == (3, [0, 1, 2], False)
    assert (found.master_addr, found.master_port) == ("127.0.0.1", None)
    assert found.command[1:] == ("-u", script, "--lr", "1")


@pytest.mark.parametrize("dash", ["-", "_"])
def test_several_hosts_as_msrun_names_them(script: str, dash: str) -> None:
    flags = ["--worker-num=8", "--local-worker-num=4", "--master-addr=h0", "--node-rank=1", "--join=False"]
    found = job(script, *(f"--{flag[2:].replace('-', dash)}" for flag in flags))
    assert (found.world_size, list(found.ranks), found.node_rank) == (8, [4, 5, 6, 7], 1)
    assert (found.master_addr, found.master_port, found.topology_s) == ("h0", 8118, 600)


def test_flags_of_msrun_that_are_switched_off_do_no_harm(script: str) -> None:
    flags = ["--bind_core=False", "--bind_numa", "False", "--sim_rank_id=-1", "--worker_log_name="]
    flags += ["--tail_worker_log=-1"]
    assert job(script, "--worker_num=2", "--local_worker_num=2", *flags) == job(script, "--nproc-per-node=2")


def test_who_waits_for_other_hosts_without_limit_also_waits_for_the_rank_table(script: str, tmp_path: Path) -> None:
    """A negative number means no limit, as for msrun."""
    path = tmp_path / "table.json"
    path.write_text('{"status": "initializing"}')
    writer = threading.Timer(0.2, write_table, (path, {"127.0.0.1": [(0, 0), (1, 1)]}))
    writer.start()
    assert job(script, f"--rank_table_file={path}", "--cluster_time_out=-1").world_size == 2
    writer.join()


@pytest.mark.parametrize("node_rank", ["-1", "3"])
def test_on_one_host_its_place_does_not_matter(script: str, node_rank: str) -> None:
    assert list(job(script, "--worker_num=2", "--local_worker_num=2", f"--node_rank={node_rank}").ranks) == [0, 1]


def test_hosts_times_workers(script: str) -> None:
    found = job(script, "--nnodes=3", "--nproc-per-node=2", "--node-rank=2", "--master-addr=h", "--master-port=77")
    assert (found.world_size, list(found.ranks), found.master_port) == (6, [4, 5], 77)


def test_a_rank_table_tells_sizes_places_and_addresses(script: str, table: Path) -> None:
    for found in (job(script, f"--rank-table-file={table}"), job(script, environ={"RANK_TABLE_FILE": str(table)})):
        assert (found.world_size, list(found.ranks), found.master_addr) == (4, [2, 3], "10.255.255.1")
        assert worker_environ(found, ("10.255.255.1", 8118), 3, "id", 0)["RANK_TABLE_FILE"] == str(table)


def write_table(path: Path, hosts: dict[str, list[tuple[int, int]]]) -> str:
    """Write a rank table with the ``(device, rank)`` pairs of each host."""
    servers = [
        {"server_id": host, "device": [{"device_id": str(d), "rank_id": str(r)} for d, r in pairs]}
        for host, pairs in hosts.items()
    ]
    path.write_text(json.dumps({"version": "1.0", "server_list": servers, "status": "completed"}))
    return str(path)


def devices_of(found: Job) -> dict[int, tuple[str, str]]:
    """Return for each rank its device and its number among the workers of its host, as the worker is told."""
    told = {rank: worker_environ(found, ("10.0.0.1", 8118), rank, "id", 0) for rank in found.ranks}
    return {rank: (env["DEVICE_ID"], env["LOCAL_RANK"]) for rank, env in told.items()}


def test_devices_of_a_rank_table_keep_their_numbers(script: str, tmp_path: Path) -> None:
    """The job has devices 4 to 7 of a host with eight. Devices 0 to 3 belong to another job."""
    path = write_table(tmp_path / "table.json", {"127.0.0.1": [(4 + n, n) for n in range(4)]})
    found = job(script, f"--rank-table-file={path}")
    assert devices_of(found) == {0: ("4", "0"), 1: ("5", "1"), 2: ("6", "2"), 3: ("7", "3")}


@pytest.mark.parametrize(("node", "expected"), [(0, {0: "2", 2: "0"}), (1, {1: "3", 3: "1"})])
def test_interleaved_ranks_run_where_the_table_says(
    script: str, tmp_path: Path, node: int, expected: dict[int, str]
) -> None:
    hosts = {"10.255.255.1": [(0, 2), (2, 0)], "10.255.255.2": [(1, 3), (3, 1)]}
    found = job(script, f"--rank-table-file={write_table(tmp_path / 't.json', hosts)}", f"--node-rank={node}")
    assert {rank: device for rank, (device, _) in devices_of(found).items()} == expected
    assert [local for _, (_, local) in sorted(devices_of(found).items())] == ["0", "1"]


@pytest.mark.parametrize(
    ("hosts", "flags", "text"),
    [
        ({"10.0.0.1": [(0, 0), (1, 1), (2, 2)], "10.0.0.2": [(0, 3)]}, [], "different numbers of devices"),
        ({"127.0.0.1": [(0, 0), (1, 1)]}, ["--nproc-per-node=1", "--node-rank=0"], "has 2 devices for 127.0.0.1"),
    ],
)
def test_a_rank_table_that_cannot_be_followed(
    script: str, tmp_path: Path, hosts: dict[str, list[tuple[int, int]]], flags: list[str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        job(script, f"--rank-table-file={write_table(tmp_path / 't.json', hosts)}", *flags)


@pytest.mark.parametrize("flag", ["--node_rank=-1", "--node-rank=-1"])
def test_msruns_default_place_is_none_on_several_hosts(script: str, table: Path, flag: str) -> None:
    """Else each host would be host 0, with two schedulers and every rank twice."""
    with pytest.raises(ConfigError, match="--node-rank is needed"):
        job(script, "--worker-num=4", "--local-worker-num=2", "--master-addr=h", flag)
    assert list(job(script, f"--rank-table-file={table}", flag).ranks) == [2, 3]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "the number of workers is missing"),
        (["--worker-num=2", "--local-worker-num=4"], "more than --worker-num"),
        (["--worker-num=5", "--local-worker-num=2", "--node-rank=0", "--master-addr=h"], "cannot be 2 on every host"),
        (["--worker-num=4", "--local-worker-num=2", "--master-addr=h"], "--node-rank is needed"),
        (["--worker-num=4", "--local-worker-num=2", "--node-rank=2", "--master-addr=h"], "need 2 hosts only"),
        (["--worker-num=4", "--local-worker-num=2", "--node-rank=0"], "--master-addr is needed"),
        (["--local-worker-num=4", "--nproc-per-node=2"], "mean the same"),
        (["--nnodes=3", "--nproc-per-node=2", "--worker-num=4"], "are not --worker-num 4"),
        (["--nnodes=4", "--worker-num=2", "--node-rank=1", "--master-addr=h"], "less than one worker on each"),
        (["--nproc-per-node=2", "--rank-table-file=/no/such/table"], "cannot be read"),
    ],
)
def test_what_cannot_be(script: str, flags: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        job(script, *flags)


def test_bad_input_is_one_message_and_64(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["--nproc-per-node", "2", "no-such.py"], "there is no script no-such.py"),
        (["--nproc-per-node", "0", script], "a number from 1"),
        (["--no-such-flag", script], "unrecognized arguments"),
        (["--nproc-per-node=2", "--monitor_interval=nan", script], "a number of seconds from 0.01"),
        (["--nproc-per-node", "2", "--master-port", "70000", script], "expected a port number"),
        (["--nproc-per-node", "2", '--bind_core={"device0": ["0-3"]}', script], "runtime.set_cpu_affinity()"),
        (["--nproc-per-node", "2", "--bind_numa", "True", script], "runtime.set_cpu_affinity()"),
        (["--nproc-per-node", "2", "--sim_level=1", script], "start it with msrun"),
        (["--nproc-per-node", "2", "--worker_log_name=worker_{ip}", script], "--log-dir has one worker_RANK.log"),
        (["--nproc-per-node", "2", "--tail_worker_log", "0", script], "without --log-dir the terminal shows"),
    ):
        assert run(["--mindspore", *words]) == 64
        said = capsys.readouterr().err
        assert text in said and "Traceback" not in said


def test_a_port_of_somebody_else(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TTP_")}
    monkeypatch.setattr(os, "environ", {**clean, "TTP_RUN_DIR": str(tmp_path / "run")})
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run(["--mindspore", "--nproc-per-node", "1", "--master-port", str(port), script]) == 64
    assert f"port {port} is in use" in capsys.readouterr().err


def test_help_names_msruns_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--mindspore", "--help"]) == 0
    said = capsys.readouterr().out
    for word in ("usage: ttp run --mindspore", "--worker-num", "--max-restarts", "TTP_OT", "75 saved"):
        assert word in said


def test_workers_are_told_in_both_spellings(script: str) -> None:
    found = job(script, "--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--master-addr=h0")
    given = worker_environ(found, ("10.0.0.1", 8118), 3, "run", 2)
    assert given | {
        "MS_ROLE": "MS_WORKER", "MS_NODE_ID": "3", "MS_WORKER_NUM": "4", "MS_SCHED_HOST": "10.0.0.1",
        "MS_SCHED_PORT": "8118", "RANK_ID": "3", "RANK_SIZE": "4", "DEVICE_ID": "1", "RANK": "3", "LOCAL_RANK": "1",
        "WORLD_SIZE": "4", "MASTER_ADDR": "h0", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "run",
    } == given  # fmt: skip


def test_the_scheduler_is_no_rank_and_has_ttp_off(script: str) -> None:
    given = scheduler_environ(job(script, "--nproc-per-node=2"), ("127.0.0.1", 1))
    assert given["MS_ROLE"] == "MS_SCHED" and given["TTP_PORT"] == "" and "RANK" not in given


@pytest.mark.parametrize(
    ("environ", "added", "warned"),
    [
        ({}, {"MS_NODE_TIMEOUT": "600", "MS_CPU_COMM_OP_TIMEOUT": "600", "OMP_NUM_THREADS": "1"}, 0),
        ({"MS_NODE_TIMEOUT": "900", "OMP_NUM_THREADS": "4"}, {"MS_CPU_COMM_OP_TIMEOUT": "600"}, 0),
        ({"MS_NODE_TIMEOUT": "30", "MS_CPU_COMM_OP_TIMEOUT": "x", "OMP_NUM_THREADS": "4"}, {}, 2),
        ({"MS_NODE_TIMEOUT": "30", "MS_CPU_COMM_OP_TIMEOUT": "360", "MS_DISABLE_HEARTBEAT": "1"}, None, 0),
    ],
)
def test_survivors_get_the_time_they_need(environ: dict[str, str], added: dict[str, str] | None, warned: int) -> None:
    """The user's settings are kept; if one is too short for a rescue, a warning is logged."""
    given, warnings = patience(environ, 360.0, 2)
    assert given == ({"OMP_NUM_THREADS": "1"} if added is None else added)
    assert len(warnings) == warned
    assert all("TTP_OT=360" in text and "600" in text for text in warnings)


def test_one_worker_keeps_its_threads() -> None:
    assert "OMP_NUM_THREADS" not in patience({}, 10, 1)[0]
    assert patience({}, 10.5, 1)[0]["MS_NODE_TIMEOUT"] == "251"
