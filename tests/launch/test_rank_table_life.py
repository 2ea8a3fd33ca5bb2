"""Rank tables of version 2.0, and tables that are not complete yet when they are read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launch.conftest import OF_MINDSPORE, Controller, Start, plan
from ttp.config import RankEnv
from ttp.errors import ConfigError
from ttp.launch.mindspore.flags import parse
from ttp.launch.rank_table import UnfinishedError, await_rank_table, read_rank_table


def without_hosts(*devices: int, status: str = "completed") -> str:
    """Return a table of version 2.0 as Ascend Operator writes it; rank 0 is on the first device."""
    level = {"net_layer": 0, "net_instance_id": "a", "net_type": "TOPO_FILE_DESC", "net_attr": "", "rank_addr_list": []}
    ranks = [{"rank_id": r, "local_id": d, "device_id": d, "level_list": [level]} for r, d in enumerate(devices)]
    return json.dumps({"status": status, "version": "2.0", "rank_count": len(ranks), "rank_list": ranks})


def with_hosts(first: int, status: str = "completed") -> str:
    device = [{"device_id": str(first + n), "rank_id": str(n)} for n in range(2)]
    return json.dumps(
        {"version": "1.0", "server_list": [{"server_id": "127.0.0.1", "device": device}], "status": status}
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    return tmp_path / "config/hccl.json"


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("devices", "local_size", "hosts"),
    [
        ((0, 1, 2, 3), None, [(0, 1, 2, 3)]),
        ((0, 1, 0, 1), None, [(0, 1), (2, 3)]),
        ((4, 5, 4, 5), 2, [(0, 1), (2, 3)]),
        ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]),  # two pods on one machine: only who launches them knows
    ],
)
def test_hosts_of_a_table_that_names_none(
    table: Path, devices: tuple[int, ...], local_size: int | None, hosts: list[tuple[int, ...]]
) -> None:
    table.write_text(without_hosts(*devices))
    found = read_rank_table(table, local_size)
    assert [server.ranks for server in found.in_order] == hosts
    assert [device for server in found.in_order for device in server.devices] == list(devices)
    assert found.master == ""


def test_a_launcher_without_hosts_in_its_table(table: Path, script: str) -> None:
    table.write_text(without_hosts(4, 5))
    alone = parse(["--mindspore", f"--rank-table-file={table}", script], {})
    assert (alone.ranks, alone.devices, alone.master_addr) == ((0, 1), (4, 5), "127.0.0.1")
    table.write_text(without_hosts(4, 5, 4, 5))
    several = ["--mindspore", f"--rank-table-file={table}", "--node-rank=1"]
    with pytest.raises(ConfigError, match="--master-addr is needed"):
        parse([*several, script], {})
    with pytest.raises(ConfigError, match="--node-rank is needed"):
        parse(["--mindspore", f"--rank-table-file={table}", "--master-addr=h0", script], {})
    second = parse([*several, "--master-addr=h0", script], {})
    assert (second.ranks, second.devices, second.world_size) == ((2, 3), (4, 5), 4)


def test_a_rank_asks_for_the_address_that_its_table_lacks(table: Path) -> None:
    table.write_text(without_hosts(0, 1, 0, 1))
    environ = {"RANK_TABLE_FILE": str(table), "RANK_ID": "3"}
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        RankEnv.from_env(environ)
    assert RankEnv.from_env(environ | {"MASTER_ADDR": "h0"}) == RankEnv(3, 4, 1, "h0", "none", 0)


@pytest.mark.parametrize(
    ("text", "local_size", "message"),
    [
        (without_hosts(0, 1).replace('"rank_count": 2', '"rank_count": 3'), None, "rank_count is 3"),
        (without_hosts(0, 1, 0, 1), 4, "device_id 0 repeats at rank_id 2"),
        (without_hosts(), None, "no rank_list"),
        (without_hosts(0, 1).replace('"rank_id": 1', '"rank_id": 7'), None, "rank_id 1 is missing"),
        (without_hosts(0, 1).replace('"rank_id": 1', '"rank_id": 0'), None, "rank_id 0 is given to two"),
        (without_hosts(0, 1).replace('"device_id": 1', '"device_id": []'), None, "not a number"),
    ],
)
def test_a_bad_one_says_what_is_wrong(table: Path, text: str, local_size: int | None, message: str) -> None:
    table.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rank_table(table, local_size)


@pytest.fixture
def write_in_turn(table: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that takes texts: each is written when the one before was looked at."""

    def wait_for(*texts: str) -> None:
        turns = iter(enumerate(texts))
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: mount(table.parent, *next(turns)))
        monkeypatch.setattr("ttp.launch.rank_table.time", clock)

    return wait_for


def mount(folder: Path, turn: int, text: str) -> None:
    """Write a table as a ConfigMap is mounted: the files are links, and a folder is swapped."""
    version = folder / f"..{turn}"
    version.mkdir()
    (version / "hccl.json").write_text(text)
    (version / "version").write_text(str(170000000 + turn))
    (folder / "..tmp").symlink_to(version)
    (folder / "..tmp").replace(folder / "..data")
    for name in ("version", "hccl.json"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data", name))


def test_a_table_is_waited_for_until_it_is_completed(
    table: Path, write_in_turn: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """At first there is no table, then half of one, then one that is initializing, then a completed one."""
    write_in_turn("{", with_hosts(0, "initializing"), with_hosts(4))
    found, version = await_rank_table(table, None, 20)
    assert (found.servers[0].devices, version) == ((4, 5), 170000002)
    assert "No such file" in caplog.text and "initializing" in caplog.text


def test_a_newer_table_is_waited_for(
    table: Path, write_in_turn: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    write_in_turn(with_hosts(0), with_hosts(2, "initializing"), with_hosts(4))
    _, first = await_rank_table(table, None, 20)
    found, second = await_rank_table(table, None, 20, newer_than=first)
    assert (found.servers[0].devices, second - first) == ((4, 5), 2)
    found, again = await_rank_table(table, None, 0.0, newer_than=second)
    assert again == second and "used as it is" in caplog.text


def test_time_is_up(table: Path) -> None:
    began_s = time.monotonic()
    table.write_text(with_hosts(0, "initializing"))
    with pytest.raises(UnfinishedError, match="wait until its writer"):
        await_rank_table(table, None, 0.2)
    with pytest.raises(ConfigError, match="cannot be read"):
        await_rank_table(table.parent / "no/such", None, 60)
    table.write_text(with_hosts(0).replace('"0"', '"x"', 1))
    with pytest.raises(ConfigError, match="not a number"):  # no wait mends it
        await_rank_table(table, None, 60)
    assert time.monotonic() - began_s < 30


def test_a_restart_follows_the_new_table(start: Start, controller: Controller, table: Path, tmp_path: Path) -> None:
    """When pods were replaced, workers restart on the devices of the new table, and not before it exists."""
    table.write_text(with_hosts(0))
    (table.parent / "version").write_text("1")
    (tmp_path / "restartType").write_text("podReschedule\n")
    flags = [f"--rank-table-file={table}", f"--restart-type-file={tmp_path / 'restartType'}", "--max-restarts=1"]
    job = start(OF_MINDSPORE, [*flags, "--monitor_interval=0.2"], "fake_worker.py", plan(attempts=1, save_s=0))
    assert job.pids(2) and [job.wait_for(f"device-{rank}-0") for rank in range(2)] == ["0", "1"]
    job.rescue()
    job.wait_for_log("still that of version 1")
    assert not job.has("pid-0-1")
    draft = table.with_name(".draft")
    draft.write_text(with_hosts(6))
    draft.replace(table)
    (table.parent / "version").write_text("2")
    assert job.finish() == 0
    assert job.has("trained-0-1")
    assert [job.wait_for(f"device-{rank}-1") for rank in range(2)] == ["6", "7"]
