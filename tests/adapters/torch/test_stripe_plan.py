"""Parts of a shard: every element in exactly one part, parts of equal size, the same on all replicas, read by stock
torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ttp.adapters.torch.saving import stripe_plan
from ttp.adapters.torch.saving.checkpoint import Chunk, chunks_of, write_shard
from ttp.adapters.torch.saving.flatten_state import StateValue, leaves
from ttp.adapters.torch.saving.inspection import agreed_on
from ttp.adapters.torch.saving.metadata import finalise
from ttp.adapters.torch.saving.stripe_plan import Share
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.core.layout import Rank, Shard
from ttp.core.messages import Piece
from ttp.errors import CheckpointError

CUT = 64
"""Bytes of the smallest tensor that is cut here."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripe_plan, "CUT_MIN", CUT)


def agreed(path: tuple[str | int, ...]) -> bool:
    return path[0] in ("model", "optim") and "buffer" not in path


def example() -> dict[str, Any]:
    """Return tensors of many kinds: tied, without dimensions, empty, not contiguous, chunks of larger ones."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    embedding = rand(30, 17)
    return {
        "model": {
            "embedding": embedding,
            "head": embedding,
            "weight": rand(50, 12),
            "bias": rand(3),
            "nothing": torch.zeros(0, 4),
            "scale": torch.tensor(3.0),
            "last": rand(4, 8, 3, 3).to(memory_format=torch.channels_last),
            "turned": rand(9, 20).t(),
            "long": rand(1, 1, 200),
            "half": rand(40, 4).bfloat16(),
            "buffer": rand(30),
        },
        "optim": {
            "state": {"weight": {"step": torch.tensor(2.0), "moment": rand(50, 12)}},
            "groups": [{"lr": 0.1, "of": ["weight"]}],
        },
        "average": {"weight": rand(5, 5)},
    }


def shares(state: dict[str, Any], count: int) -> list[list[StateValue]]:
    """Return the entries of each part. Asserts that all parts were cut in the same way."""
    parts = [Share(index, count, agreed).select(leaves(state)) for index in range(1, count + 1)]
    assert len({told for _, told in parts}) == 1
    return [entries for entries, _ in parts]


def covered(state: dict[str, Any], parts: list[list[StateValue]]) -> dict[str, Tensor]:
    """Return how often each element of each tensor is written."""
    seen: dict[str, Tensor] = {}
    for path, _, value in (entry for entries in parts for entry in entries):
        for chunk in chunks_of(value) or ():
            counts = seen.setdefault(str(path), torch.zeros(chunk.shape, dtype=torch.int))
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.tensor.shape, strict=True))
            counts[box] += 1
    return seen


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16])
def test_every_element_is_in_exactly_one_part(count: int) -> None:
    state = example()
    parts = shares(state, count)
    counts = covered(state, parts)
    assert counts.keys() == {str(path) for path, _, value in leaves(state) if isinstance(value, Tensor)}
    assert all(bool((of_one == 1).all()) for of_one in counts.values())
    plain = [entry for entries in parts for entry in entries if chunks_of(entry[2]) is None]
    assert [e[0] for e in plain] == sorted(p for p, _, v in leaves(state) if not isinstance(v, Tensor))
    for first_only in ("buffer", "average", "groups"):
        assert not any(first_only in entry[0] for entries in parts[1:] for entry in entries)


shapes = st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=8)


@given(shapes, st.integers(2, 9), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_are_about_equally_large(dims: list[list[int]], count: int, fixed: bool) -> None:
    model = {f"t{i:02}": torch.zeros(shape) for i, shape in enumerate(dims)}
    state: dict[str, Any] = {"model": model} | ({"average": torch.zeros(100)} if fixed else {})
    parts = shares(state, count)
    assert all(bool((of_one == 1).all()) for of_one in covered(state, parts).values())
    sizes = [sum(c.tensor.nbytes for e in entries for c in chunks_of(e[2]) or ()) for entries in parts]
    row = max((t.nbytes // next((n for n in t.shape if n > 1), 1) for t in model.values()), default=0)
    ideal = max(sum(sizes) / count, 400.0 * fixed)
    assert max(sizes) <= ideal + max(CUT, row)


def test_a_cut_goes_through_one_tensor_and_copies_nothing() -> None:
    state = {"model": {f"t{i}": torch.zeros(100, 10) for i in range(5)}}
    parts = shares(state, 4)
    cut = [chunk for entries in parts for _, _, v in entries if isinstance(v, tuple) for chunk in v]
    assert len(cut) <= 2 * 3
    inside = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in state["model"].values()]
    assert all(any(begin <= chunk.tensor.data_ptr() < end for begin, end in inside) for chunk in cut)


def test_chunks_of_larger_tensors_are_cut_once_more() -> None:
    whole = torch.arange(600.0).view(30, 20)
    state = {"model": {"w": (Chunk(whole[:10], (60, 20), (5, 0)), Chunk(whole[10:], (60, 20), (30, 0)))}}
    parts = shares(state, 5)
    counts = covered(state, parts)["('model', 'w')"]
    assert [sum(c.tensor.nbytes for e in entries for c in chunks_of(e[2]) or ()) for entries in parts] == [480] * 5
    assert counts.sum(1).tolist() == [0] * 5 + [20] * 10 + [0] * 15 + [20] * 20 + [0] * 10


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("count", [2, 5])
def test_stock_torch_loads_what_several_have_written(tmp_path: Path, count: int) -> None:
    state = example()
    pieces = [write(tmp_path, state, index, count) for index in range(1, count + 1)]
    assert len({piece.cut for piece in pieces}) == 1 and pieces[0].cut
    finalise(tmp_path, pieces)
    loaded = torch.utils._pytree.tree_map(lambda v: torch.zeros_like(v) if isinstance(v, Tensor) else v, example())
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)  # type: ignore[attr-defined]
    wanted = {(p, k): v for p, k, v in leaves(state)}
    for path, keys, value in leaves(loaded):
        same = torch.equal(value, wanted[path, keys]) if isinstance(value, Tensor) else value == wanted[path, keys]
        assert same, path
    tied = [piece for piece in pieces if '"head"' in piece.table]
    alone = write(tmp_path, {"model": {"embedding": state["model"]["embedding"]}}, 1, 1)
    total = sum(c.tensor.nbytes for _, _, v in leaves(state) for c in chunks_of(v) or ()) - 30 * 17 * 4
    assert tied and sum(piece.size for piece in pieces) < total + 40 * (alone.size - 30 * 17 * 4)  # once, not twice


def write(draft: Path, state: dict[str, Any], index: int, count: int) -> Piece:
    shard, share = Shard(f"model#{index}/{count}"), Share(index, count, agreed)
    return write_shard(
        draft, f"__0_{index}of{count}.distcp", state, shard=shard, writer=Rank(index), select=share.select
    )


def test_a_part_that_lacks_is_noticed(tmp_path: Path) -> None:
    pieces = [write(tmp_path, example(), index, 3) for index in (1, 3)]
    with pytest.raises(CheckpointError, match="do not fit together"):
        finalise(tmp_path, pieces)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["model"].update(extra=torch.zeros(4)),
        lambda s: s["model"].update(weight=torch.zeros(50, 13)),
        lambda s: s["model"].update(weight=torch.zeros(50, 12).double()),
        lambda s: s["model"].update(head=s["model"]["embedding"].clone()),
        lambda s: s.update(average={}),
    ],
    ids=["one more", "another shape", "another type", "not tied", "no average"],
)
def test_whoever_holds_something_else_says_so(change: Any) -> None:
    other = example()
    change(other)
    assert Share(1, 2, agreed).select(leaves(other))[1] != Share(2, 2, agreed).select(leaves(example()))[1]


def test_what_is_compared_between_replicas_is_divided() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    divided = agreed_on(ModelNames(model, torch.optim.SGD(model.parameters(), lr=1.0)))
    assert divided(("model", "0.weight")) and divided(("optim", "state", "1.bias", "exp_avg"))
    for path in (("model", "1.running_mean"), ("optim", "param_groups", 0, "lr"), ("scheduler", "last_epoch"),
                 ("ttp", "version"), ("extra", "ema", "0.weight"), ("optim", "state", "other", "step")):  # fmt: skip
        assert not divided(path), path
