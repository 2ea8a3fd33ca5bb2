"""A refusal is the same on every rank, whichever rank has the problem."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.adapters.torch.worlds import run_world
from tests.waiting import until
from ttp.adapters.torch.sharding import exchange, unconnected
from ttp.adapters.torch.sharding.discovery import refuse_left_alone
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.adapters.torch.sharding.shard_discovery import RankShards, StatedShards
from ttp.adapters.torch.sharding.unconnected import OptimizerState, different_weights
from ttp.config import RankEnv
from ttp.core.layout import Version
from ttp.errors import ConfigError, DirectoryInUseError, UsageError
from ttp.store import arrays

HOST = socket.gethostname()

pytestmark = pytest.mark.xdist_group("refusals")  # they share a world


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of both ranks, which is the same."""
    one, other = run_world(
        tmp_path_factory.mktemp("world"), "tests.adapters.torch.refusal_worker", "everything", size=2
    )
    assert one == other
    assert isinstance(one, dict)
    return one


def test_what_is_wrong_on_one_rank_is_said_by_both(told: dict[str, Any]) -> None:
    start = f"ConfigError: rank 1 on {HOST}: this training state could not be saved: model.odd is on the device 'meta'"
    assert told["one rank"].startswith(start)


def test_a_name_that_is_not_utf8_is_told_to_all_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for the rank that failed to tell it."""

    def refuse() -> bytes:
        raise ConfigError("cannot write to /runs/caf\udce9")

    monkeypatch.setattr(exchange, "gather_bytes", lambda mine: [mine])
    with pytest.raises(ConfigError, match=r"cannot write to /runs/caf\\udce9"):
        exchange.gather_or_refuse(refuse)


def test_what_is_wrong_before_they_ask_each_other_too(told: dict[str, Any]) -> None:
    parameters, place = told["public"]
    where = f"ConfigError: rank 0 on {HOST}: "
    assert parameters.startswith(f"{where}the optimizer holds 2 parameters that model= does not contain")
    assert place.startswith(where) and "/proc/nowhere" in place


def test_a_layout_that_one_rank_does_not_fit(told: dict[str, Any]) -> None:
    said = told["a layout that rank 1 does not fit"]
    assert "shard_of says that common" not in said
    assert said.startswith(f"ConfigError: rank 1 on {HOST}: shard_of says that own.")


def test_one_name_for_two_shards_of_a_layout(told: dict[str, Any]) -> None:
    text = "ConfigError: shards 'a' and 'b' of the layout have parameters of the same names and shapes"
    assert told["one name in two shards"].startswith(text)


def said_by_second(told: dict[str, Any], case: str) -> str:
    """Return what the rank is told that comes second; the first one has nothing to be compared with."""
    first, second = sorted(told[case])
    assert first == "" and isinstance(second, str)
    return second


@pytest.mark.supports("gradients reduced by hand")
class TestGradientsReducedByHand:
    @pytest.mark.parametrize("case", ["on their own", "now and then", "outside of DDP"])
    def test_ranks_that_train_different_weights_are_refused(self, told: dict[str, Any], case: str) -> None:
        said = said_by_second(told, case)
        assert said.startswith("UsageError: the weights of rank ")
        assert f"(compared: {'loss.bias, loss.weight' if case == 'outside of DDP' else 'bias, weight'})" in said
        assert "a part of the weights (tensor parallelism by hand)" in said and "DTensor.from_local()" in said

    def test_a_state_of_the_optimizer_that_differs_is_told(self, told: dict[str, Any]) -> None:
        """Weights that are averaged in every version (DiLoCo) are equal; what the ranks' own updates leave is not."""
        said = said_by_second(told, "state of their own")
        assert said.startswith("the optimizer's state differs from that of rank")
        assert "(compared: bias, weight)" in said and "give this optimizer as extra_state= too" in said

    @pytest.mark.supports("weights initialised from the first batch")
    @pytest.mark.parametrize("case", ["initialised by each rank", "past the DDP", "beside a distributed tensor"])
    def test_weights_that_ddp_does_not_keep_equal_are_told(self, told: dict[str, Any], case: str) -> None:
        """It reduces gradients: what a rank writes to weights by itself stays different for ever."""
        said = said_by_second(told, case)
        assert said.startswith("the weights of rank ") and "although a DistributedDataParallel has them" in said

    @pytest.mark.parametrize(
        "case",
        [
            "always",  # the gradients are reduced by hand in each update
            "declared",  # the layout says that the ranks are copies
            "connected",
            "state of their own as extra state",
            "counts of their own",  # on the host, which may be some updates ahead of its device
            "as small as a share",  # an optimizer may keep less than its parameters have (APOLLO)
            "state made anew",  # compared as it was after the same update, however late another thread comes to it
        ],
    )
    def test_ranks_that_are_copies_are_told_nothing(self, told: dict[str, Any], case: str) -> None:
        assert told[case] == ["", ""]


@pytest.mark.supports("state spread by the optimizer itself")
@pytest.mark.parametrize("case", ["state on one rank", "state on one rank, and as extra state"])
def test_a_state_of_the_optimizer_that_only_one_rank_has_is_refused(told: dict[str, Any], case: str) -> None:
    """A checkpoint is written by one of the ranks, which lacks the state of the others. What a rank has given as extra
    state too is lost with its host.
    """
    said = said_by_second(told, case)
    assert said.startswith("UsageError: the optimizer keeps its state spread over the ranks: rank ")
    assert "has state for 1 parameter (weight)" in said or "has state for 1 parameter (bias)" in said


@pytest.mark.supports("state spread by the optimizer itself")
@pytest.mark.parametrize(
    "case",
    [
        "rows of a parameter",
        "rows of a parameter, and as extra state",
        "parameters of a group",
        "one parameter of a group",
    ],
)
def test_shares_of_a_state_are_refused(told: dict[str, Any], case: str) -> None:
    """Of the rows of each parameter, as with modded-nanogpt's DistAdam, or of the parameters of a group (NorMuon)."""
    said = said_by_second(told, case)
    assert said.startswith("UsageError: the optimizer keeps its state spread over the ranks: rank ")
    assert " have different shares of that for " in said and "ReplicatedOptimizer" in said


def test_ranks_are_not_compared_if_the_keeper_of_the_store_has_died(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another rank may have died in that update: nothing is wrong with this one."""
    library: Any = dist  # its stubs lack the store
    kept = library.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = library.TCPStore("127.0.0.1", kept.port, is_master=False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: client)
    del kept
    names = ModelNames(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()))
    env = RankEnv(0, 2, 0, "127.0.0.1", "none", 0)
    assert different_weights([], names, OptimizerState([], {}, [], {}), (), env, Version(5)) == ""
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_parameters_that_the_loop_has_replaced_are_not_compared(world_of_one: None) -> None:
    names = ModelNames(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()))
    env = RankEnv(0, 1, 0, "127.0.0.1", "none", 0)
    noted = [(model.weight, b"of the weight"), (model.bias, b"of one that is gone")]
    model.bias = nn.Parameter(torch.ones(2))
    assert different_weights(noted, names, OptimizerState([model.bias], {}, [], {}), (), env, Version(5)) == ""


def test_a_rank_that_goes_on_is_compared_with_one_that_takes_a_dead_ones_place(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former has trained in an earlier launch already."""
    names = ModelNames(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()))
    ranks = [RankEnv(rank, 2, rank, "127.0.0.1", "goes on", launch) for rank, launch in ((0, 0), (0, 1), (1, 1))]
    found = []
    for env in ranks:
        if env.rank:
            monkeypatch.setattr(unconnected, "_numbers", type(unconnected._numbers)())  # a new process
        noted = [(model.weight, b"of rank %d" % env.rank)]
        found.append(different_weights(noted, names, OptimizerState([], {}, [], {}), (), env, Version(5)))
    assert found[:2] == ["", ""] and "rank 0" in found[2]


@pytest.mark.supports("parameters that DDP ignores")
class TestIgnoredByDistributedDataParallel:
    def test_trained_under_one_name_they_are_refused(self, told: dict[str, Any]) -> None:
        text = told["both ranks"]
        assert text.startswith(
            "ConfigError: DistributedDataParallel was told to ignore experts.mine.bias, experts.mine.w"
        )
        for cure in ("ranks 0-1", "nn.ModuleDict", "buddy=True", "layout=ttp.Layout.data_parallel(2)"):
            assert cure in text

    def test_unless_they_are_said_to_be_copies(self, told: dict[str, Any]) -> None:
        assert told["said to be copies"] == ""

    def test_frozen_they_have_to_be_equal(self, told: dict[str, Any]) -> None:
        assert told["frozen and equal"] == ""
        assert "no optimizer trains, and they are not equal on all ranks" in told["frozen and not"]

    def test_under_names_of_their_own_they_are_shards_and_come_back(self, told: dict[str, Any]) -> None:
        assert told["experts"]["same"]
        assert sorted(told["experts"]["groups"].values()) == [[0], [0, 1], [1]]

    def test_so_are_parameters_that_it_does_not_have(self, told: dict[str, Any]) -> None:
        """The tables of DLRM: each rank has its own, beside the DistributedDataParallel modules of the layers."""
        assert told["tables"]["same"]
        assert sorted(told["tables"]["groups"].values()) == [[0], [0, 1], [1]]

    @pytest.mark.parametrize("case", ["a table on one rank", "an expert on one rank"])
    def test_one_that_only_one_rank_has_is_a_shard(self, told: dict[str, Any], case: str) -> None:
        assert told[case] == [[0, 1], [1]]

    def test_under_one_name_they_have_to_be_alike(self, told: dict[str, Any]) -> None:
        text = told["tables of one name"]
        assert text.startswith("have different tensors under the same name (mine.")
        assert "give wrap_optimizer() layout=ttp.Layout(2, {shard: ranks, ...}) and shard_of=" in text  # the other cure

    def test_the_words_are_the_same_where_nothing_is_wrong(self) -> None:
        views = [
            RankShards((StatedShards("n", "p", alone=("e",)),)),
            RankShards((StatedShards("n", "p", alone=("e",)),)),
            RankShards((StatedShards("m", "q"),)),
        ]
        with pytest.raises(ConfigError, match=r"ignore e, .* on ranks 0-1, .*data_parallel\(3\)"):
            refuse_left_alone(views)


class TestExchange:
    @pytest.fixture
    def group(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
        dist.init_process_group(request.param, init_method=f"file://{tmp_path / 's'}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @pytest.mark.parametrize(("group", "device"), [("gloo", "cpu"), ("cuda:gloo", "cuda")], indirect=["group"])
    def test_goes_where_the_group_has_a_backend(
        self, group: None, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With NCCL alone that is the device. Here gloo stands for NCCL with CUDA tensors."""
        monkeypatch.setattr(arrays, "_home", {})
        assert exchange._device() == torch.device(device)

    @pytest.mark.parametrize("group", ["cuda:gloo"], indirect=True)
    def test_goes_by_the_device_of_this_rank_whichever_is_current(
        self, group: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else NCCL would make a second communicator, on another rank's device, and wait for ranks that make none."""
        monkeypatch.setattr(arrays, "_home", {"cuda": torch.device("cuda", 3)})
        assert exchange._device() == torch.device("cuda", 3)
        whole: Any = dist.group.WORLD
        whole.bound_device_id = torch.device("cuda", 2)
        assert exchange._device() == torch.device("cuda", 2)

    @pytest.mark.parametrize("group", ["gloo"], indirect=True)
    @pytest.mark.parametrize("kind", [ConfigError, DirectoryInUseError, UsageError])
    def test_a_refusal_keeps_its_kind_and_its_words(self, group: None, kind: type[Exception]) -> None:
        def make() -> bytes:
            raise kind("it is wrong")

        with pytest.raises(kind, match=r"^it is wrong$") as caught:
            exchange.gather_or_refuse(make)
        assert caught.type is kind
        with pytest.raises(kind, match=r"^it is wrong$"):
            exchange.refuse_everywhere(kind("it is wrong"), 1)  # type: ignore[arg-type]
        assert exchange.gather_or_refuse(lambda: b"x") == [b"x"]

    @pytest.mark.parametrize("group", ["gloo"], indirect=True)
    def test_a_rank_that_waits_for_others_says_what_they_have_to_call(
        self, group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        every = dist.all_gather

        def late(*args: Any) -> None:
            until(lambda: "every rank has to call wrap_optimizer()" in caplog.text, story=lambda: caplog.text)
            every(*args)

        monkeypatch.setattr(exchange, "_LATE_S", 0.01)
        monkeypatch.setattr(dist, "all_gather", late)
        assert exchange.gather_bytes(b"x") == [b"x"]

    def test_without_a_group_nobody_is_told(self) -> None:
        exchange.refuse_everywhere(ConfigError("it is wrong"), 2)
