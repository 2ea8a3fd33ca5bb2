"""The rank and world size of a process, from the variables of msrun, mpirun and rank tables."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.config import RankEnv
from ttp.errors import ConfigError
from ttp.launch.rank_table import read_rank_table

TABLE: dict[str, Any] = {
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {
            "server_id": f"10.0.0.{host}",
            "device": [
                {"device_id": str(d), "device_ip": f"192.{d}.27.{host}", "rank_id": str((host - 1) * 8 + d)}
                for d in range(8)
            ],
            "host_nic_ip": "reserve",
        }
        for host in (1, 2)
    ],
    "status": "completed",
}
MSRUN = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "3", "MS_WORKER_NUM": "4", "MS_SCHED_HOST": "10.0.0.9", "DEVICE_ID": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rank_table_16pcs.json"
    path.write_text(json.dumps(TABLE))
    return path


def test_a_worker_of_msrun() -> None:
    assert RankEnv.from_env(MSRUN) == RankEnv(3, 4, 1, "10.0.0.9", "none", 0)


def test_a_pods_own_rank_is_not_the_workers() -> None:
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0"}
    assert RankEnv.from_env(MSRUN | pod) == RankEnv(3, 4, 1, "pod-0", "none", 0)


def test_mpirun_on_one_host() -> None:
    assert RankEnv.from_env(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == RankEnv(2, 4, 2, "127.0.0.1", "none", 0)


def test_mpirun_on_several_hosts_needs_an_address(table: Path) -> None:
    several = MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="MASTER_ADDR is not"):
        RankEnv.from_env(several)
    assert RankEnv.from_env(several | {"MASTER_ADDR": "h"}).master_addr == "h"
    assert RankEnv.from_env(several | {"RANK_TABLE_FILE": str(table)}).master_addr == "10.0.0.1"


@pytest.mark.parametrize(("rank", "local"), [(0, 0), (9, 1), (15, 7)])
def test_a_rank_table(table: Path, rank: int, local: int) -> None:
    found = RankEnv.from_env({"RANK_TABLE_FILE": str(table), "RANK_ID": str(rank), "RANK_SIZE": "16"})
    assert found == RankEnv(rank, 16, local, "10.0.0.1", "none", 0)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"MS_ROLE": "MS_SCHED"}, "scheduler"),
        ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "RANK_ID": "0"}, "--node_rank"),
        ({"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "0"}, "WORLD_SIZE='' is not a whole number"),
        ({"RANK_ID": "16", "RANK_TABLE_FILE": "TABLE"}, "rank 16 is not in the rank table"),
        ({"RANK_ID": "1", "RANK_SIZE": "8", "RANK_TABLE_FILE": "TABLE"}, "make them agree"),
        ({"RANK_ID": "x", "RANK_SIZE": "8", "RANK_TABLE_FILE": "TABLE"}, "RANK='x' is not a whole number"),
        ({"RANK_ID": "1", "RANK_SIZE": "8"}, "MASTER_ADDR"),
        ({"RANK_ID": "1", "RANK_TABLE_FILE": "/no/such.json"}, "cannot be read: No such file"),
    ],
)
def test_what_does_not_tell_a_rank(environ: dict[str, str], text: str, table: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        RankEnv.from_env({k: str(table) if v == "TABLE" else v for k, v in environ.items()})


def changed(change: Any) -> str:
    document = copy.deepcopy(TABLE)
    change(document)
    return json.dumps(document)


def set_in(*path: Any, to: Any) -> Any:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        if to is None:
            del document[path[-1]]
        else:
            document[path[-1]] = to

    return change


BAD_TABLES: dict[str, tuple[str, str]] = {
    "no json": ("{", "is not JSON"),
    "a list": ("[]", "an object with server_list"),
    "old": (changed(set_in("version", to="0.1")), "version is '0.1'; 1.0, 1.2, 2.0 are known"),
    "unfinished": (changed(set_in("status", to="initializing")), "wait until"),
    "no servers": (changed(set_in("server_list", to=None)), "no server_list"),
    "count": (changed(set_in("server_count", to="3")), "2 servers are listed"),
    "no address": (changed(set_in("server_list", 1, "server_id", to=None)), r"server_list\[1\] has no server_id"),
    "no devices": (changed(set_in("server_list", 0, "device", to=[])), r"server_list\[0\] has no device"),
    "no rank": (changed(set_in("server_list", 0, "device", 3, "rank_id", to=None)), r"device\[3\] is None"),
    "negative": (changed(set_in("server_list", 0, "device", 3, "rank_id", to="-1")), "not a number of at least 0"),
    "twice": (changed(set_in("server_list", 0, "device", 3, "rank_id", to="4")), "rank_id 4 is given to two"),
    "gap": (changed(set_in("server_list", 1, "device", 7, "rank_id", to="16")), "rank_id 15 is missing"),
    "device": (changed(set_in("server_list", 0, "device", 3, "device_id", to="4")), "one device_id twice"),
    "order": (changed(set_in("server_list", 0, "server_id", to="10.0.0.3")), "in the order of server_id"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_bad_table_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    text, message = BAD_TABLES[name]
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_rank_table(path)
    assert str(path) in str(caught.value)


@settings(max_examples=60)
@given(st.recursive(st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["version", "server_list", "device", "rank_id", "device_id", "server_id", "status"]), inner
), max_leaves=20))  # fmt: skip
def test_any_json_is_a_table_or_refused(document: Any) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(document, file)
        file.flush()
        with pytest.raises(ConfigError):
            read_rank_table(file.name)
