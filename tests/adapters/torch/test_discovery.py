"""Which ranks hold the same shard, decided from their descriptions; chunks of cut tensors; param groups of pipeline
stages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from ttp.adapters.torch.restoring.param_groups import groups_for
from ttp.adapters.torch.sharding import discovery, dtensor_chunks, shard_discovery
from ttp.adapters.torch.sharding.discovery import explicit, named, refuse_strangers, same_shards
from ttp.adapters.torch.sharding.local_chunks import boxes
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.adapters.torch.sharding.shard_discovery import RankShards, StatedShards, label_of
from ttp.adapters.torch.sharding.sharding import TrainingObjects, sharding_of
from ttp.core.layout import Layout, Rank, Shard
from ttp.errors import ConfigError


def view(*parts: str, scopes: tuple[int, ...] = (), stages: tuple[int, ...] = ()) -> RankShards:
    """Return a rank's shards. The part before a colon gives the names; the whole text gives the cut."""
    return RankShards(tuple(StatedShards(part.partition(":")[0], part) for part in parts), scopes, stages)


def groups_of(views: list[RankShards]) -> dict[str, tuple[int, ...]]:
    shards = same_shards(views)
    refuse_strangers(shards, views)
    layout, _ = named(shards, len(views))
    return {shard: tuple(ranks) for shard, ranks in layout.groups.items()}


class TestGroups:
    def test_what_is_said_survives_the_way(self) -> None:
        said = view("w:0", "b", scopes=(0, 3), stages=(1,))
        assert RankShards.decode(said.encode()) == said

    def test_one_shard_is_the_model(self) -> None:
        assert groups_of([view("w")] * 3) == {"model": (0, 1, 2)}

    def test_hsdp(self) -> None:
        views = [view(f"w:{rank % 2}", "b", scopes=(0,)) for rank in range(4)]
        assert groups_of(views) == {"model-0": (0, 2), "model-1": (1, 3), "common": (0, 1, 2, 3)}

    def test_numbers_sort_as_they_count(self) -> None:
        names = list(groups_of([view(f"w:{rank}") for rank in range(12)]))
        assert names[:3] == ["model-00", "model-01", "model-02"] and names[-1] == "model-11"

    def test_which_ranks_are_connected_is_found_once_for_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Anew for each rank it would take a time that grows with the square of their number."""
        found, calls = discovery._components, list[int]()

        def counted(views: list[RankShards]) -> list[int]:
            calls.append(len(views))
            return found(views)

        monkeypatch.setattr(discovery, "_components", counted)
        assert len(same_shards([view(f"w:{rank}", scopes=(0,)) for rank in range(8)])) == 8 and calls == [8]

    def test_groups_of_ranks_that_overlap_connect(self) -> None:
        """TP2 x DP2: each rank names its mesh and its DistributedDataParallel."""
        scopes = [(0, 0), (0, 1), (2, 0), (2, 1)]
        views = [view(f"w:{rank % 2}", scopes=tuple(sorted(set(scopes[rank])))) for rank in range(4)]
        assert groups_of(views) == {"model-0": (0, 2), "model-1": (1, 3)}

    def test_stages_of_equal_names_that_nothing_connects(self) -> None:
        views = [view("w", scopes=(0,)), view("w", scopes=(0,)), view("w", scopes=(2,)), view("w", scopes=(2,))]
        with pytest.raises(ConfigError, match=r"rank 0 and rank 2 hold parameters of the same names .*nn.ModuleDict"):
            groups_of(views)

    def test_stages_of_equal_names_without_replicas(self) -> None:
        """Only torch's own pipeline shows that the ranks are not data parallel."""
        with pytest.raises(ConfigError, match=r"rank 0 \(pipeline stage 0\) and rank 1 \(pipeline stage 1\)"):
            groups_of([view("w", stages=(0,)), view("w", stages=(1,))])

    def test_stages_of_different_names(self) -> None:
        views = [view("front", scopes=(0,)), view("front", scopes=(0,)), view("back", scopes=(2,))]
        assert groups_of(views) == {"model-0": (0, 1), "model-1": (2,)}

    def test_stages_are_found_and_nothing_else_is_asked_what_it_is(self) -> None:
        """Asking for its class makes some objects warn, as torch's own do, or load a library."""
        from torch.distributed.pipelining import PipelineStage

        def ask(_: object) -> None:
            raise AssertionError("asked")

        bystander = type("Shy", (), {"__class__": property(ask)})()
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        stage = PipelineStage.__new__(PipelineStage)
        stage.submod, stage.stage_index = model[1], 3
        assert shard_discovery._stages(model) == (3,)
        assert shard_discovery._stages(nn.Linear(1, 1)) == ()
        del bystander, stage


class TestExplicit:
    LAYOUT = Layout(2, {Shard("a"): (Rank(0),), Shard("b"): (Rank(0), Rank(1))})

    @staticmethod
    def labelled(*shards: tuple[str, str]) -> RankShards:
        return RankShards(tuple(StatedShards(parts, parts, label) for parts, label in shards))

    def test_the_names_are_the_users(self) -> None:
        views = [self.labelled(("w", "a"), ("x", "b")), self.labelled(("x", "b"))]
        assert set(explicit(same_shards(views), self.LAYOUT).values()) == {"a", "b"}

    @pytest.mark.parametrize(
        ("first", "second", "why"),
        [
            ((("w", "a"), ("x", "b")), ("y", "b"), "ranks 0-1 hold copies of shard 'b', but"),
            ((("x", "b"),), ("x", "b"), "no parameter belongs to shard 'a'"),
        ],
    )
    def test_replicas_that_hold_something_else_and_a_shard_of_nothing(self, first: Any, second: Any, why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            explicit(same_shards([self.labelled(*first), self.labelled(second)]), self.LAYOUT)

    @staticmethod
    def parts(layout: Layout, shard_of: Any = None) -> TrainingObjects:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        return TrainingObjects(model, optimizer, ModelNames(model, optimizer), layout.world_size, {}, layout, shard_of)

    def test_where_a_parameter_belongs(self) -> None:
        assert label_of(self.parts(self.LAYOUT), "weight", 1) == "b"
        assert label_of(self.parts(self.LAYOUT, {"weight": "a"}.get), "weight", 0) == "a"
        with pytest.raises(ConfigError, match=r"rank 0 holds 2 shards \(a, b\): give wrap_optimizer\(\) shard_of="):
            label_of(self.parts(self.LAYOUT), "weight", 0)
        with pytest.raises(ConfigError, match="weight belongs to 'a', which rank 1 does not hold"):
            label_of(self.parts(self.LAYOUT, lambda _: "a"), "weight", 1)

    def test_ranks_that_cannot_ask_each_other_and_of_one_shard_do_not_have_to(self) -> None:
        with pytest.raises(ConfigError, match=r"call init_process_group\(\) before wrap_optimizer\(\)"):
            sharding_of(self.parts(self.LAYOUT))
        layout = Layout(2, {Shard("all"): (Rank(0), Rank(1))})
        assert sharding_of(self.parts(layout)).layout is layout


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Draw memory with distinct numbers, a view of it in memory order, and a stretch of the memory."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    first, strides, span = draw(st.integers(0, 4)), [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        strides[dim] = span + gaps[dim]
        span = (sizes[dim] - 1) * strides[dim] + span
    memory = torch.arange(first + span + 3)
    begin = draw(st.integers(0, len(memory)))
    end = draw(st.integers(begin, len(memory)))
    return memory, memory.as_strided(sizes, strides, first), begin, end


class TestCuts:
    @given(st.lists(st.integers(1, 4), max_size=4), st.data())
    def test_consecutive_elements_are_rectangles(self, shape: list[int], data: st.DataObject) -> None:
        whole = torch.arange(torch.Size(shape).numel())
        start = data.draw(st.integers(0, whole.numel()))
        stop = data.draw(st.integers(start, whole.numel())) if shape else 1
        start = start if shape else 0
        chunks = dtensor_chunks.flat_chunks(whole[start:stop], shape, start)
        found = torch.full(shape, -1)
        for chunk in chunks:
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.tensor.shape, strict=True))
            assert (found[box] == -1).all()
            found[box] = chunk.tensor
        expected = torch.full_like(whole, -1)
        expected[start:stop] = whole[start:stop]
        assert torch.equal(found.reshape(-1), expected)
        assert len(chunks) <= max(1, 2 * len(shape) - 1)

    @given(st.integers(1, 23), st.integers(1, 4), st.integers(1, 4))
    def test_a_strided_cut_below_a_plain_one_is_what_torch_makes_of_it(self, size: int, copies: int, tp: int) -> None:
        """FSDP cuts the parts of tensor parallelism: every element exactly once, and contiguous here."""
        seen: list[int] = []
        for t in range(tp):
            local = dtensor_chunks._part(torch.arange(size), 1, tp, t)
            for c in range(copies):
                direct = dtensor_chunks._part(local, 1, copies, c)
                strided = dtensor_chunks._part(torch.arange(size), tp, copies, c)
                seen += direct.tolist()
                assert set(direct.tolist()) <= set(strided.tolist())
        assert sorted(seen) == list(range(size))

    def test_stretches(self) -> None:
        assert dtensor_chunks._stretches(torch.tensor([3, 4, 5, 9, 10, 2])) == [(0, 3, 3), (3, 9, 2), (5, 2, 1)]
        assert dtensor_chunks._stretches(torch.tensor([], dtype=torch.int64)) == []

    @given(tensors())
    def test_local_chunks_hold_each_element_of_the_stretch_once_and_no_other(
        self, case: tuple[torch.Tensor, torch.Tensor, int, int]
    ) -> None:
        memory, view, begin, end = case
        seen: list[int] = []
        found = list(boxes(view.shape, view.stride(), int(view.storage_offset()), begin, end))
        for box in found:
            mine = view[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(box.of(memory[begin:end], begin), mine)
            seen += mine.reshape(-1).tolist()
        assert sorted(seen) == [n for n in sorted(view.reshape(-1).tolist()) if begin <= n < end]
        assert len(set(seen)) == len(seen)
        assert len(found) <= max(1, 2 * view.dim() - 1)

    def test_an_empty_tensor_has_no_boxes_and_a_transposed_one_is_refused(self) -> None:
        assert list(boxes((0, 3), (3, 1), 0, 0, 10)) == []
        with pytest.raises(ValueError, match="memory order"):
            list(boxes((2, 3), (1, 2), 0, 0, 6))


class TestParamGroups:
    SAVED: tuple[dict[str, Any], ...] = (
        {"lr": 1.0, "params": ["0.weight", "1.weight"]},
        {"lr": 2.0, "params": ["0.bias", "1.bias"]},
    )

    @staticmethod
    def stage(*layers: str) -> tuple[ModelNames, Optimizer]:
        model = nn.ModuleDict({layer: nn.Linear(2, 2) for layer in layers})
        weights, biases = ([getattr(m, key) for m in model.values()] for key in ("weight", "bias"))
        optimizer = torch.optim.SGD([{"params": weights}, {"params": biases}])
        return ModelNames(model, optimizer), optimizer

    def test_a_list_for_the_whole_model_stays(self) -> None:
        assert groups_for(list(self.SAVED), *self.stage("0", "1"), ()) == list(self.SAVED)

    def test_a_stage_takes_what_is_its_own(self) -> None:
        found = groups_for(list(self.SAVED), *self.stage("1"), {"0.weight", "0.bias"})
        assert found == [{"lr": 1.0, "params": ["1.weight"]}, {"lr": 2.0, "params": ["1.bias"]}]

    def test_of_stages_the_whole_is_made_again(self) -> None:
        each = {name: {"lr": group["lr"]} for group in self.SAVED for name in group["params"]}
        assert groups_for(each, *self.stage("0", "1"), ()) == list(self.SAVED)

    def test_what_nobody_has_is_not_forgotten(self) -> None:
        found = groups_for(list(self.SAVED), *self.stage("1"), {"0.weight"})
        assert found[-1]["params"] == ["1.bias", "0.bias"], "too many, as the comparison will say"
