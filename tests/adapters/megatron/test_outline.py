"""What a rank tells about itself for Megatron's legacy layout, and how the whole model's names come out of it."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttp.adapters.megatron.contents import _global_name
from ttp.adapters.megatron.geometry import Tile
from ttp.adapters.megatron.mapped import Mapped
from ttp.adapters.megatron.rank_layout import (
    FlatBuffer,
    LocalOptimizer,
    LocalTensor,
    Place,
    RankLayout,
    _plain_args,
)
from ttp.adapters.torch.local_state.rng import RngState, streams_of
from ttp.errors import CheckpointError

TILE = Tile("decoder.layers.mlp.weight", (4, 8, 3), (2, 4, 0), (4, 3), (3, 1), 0, flexible=True)
OUTLINE = RankLayout(
    place=Place((1, 2), (0, 1), (0, 1)),
    ranks=(1, 3),
    streams=(1,),
    tensors=(LocalTensor("bfloat16", (4, 3), (TILE,)),),
    chunks=({"decoder.layers.0.mlp.weight": 0, "mlp._extra_state": "key/shard_0_1", "absent": None},),
    optimizers=(
        LocalOptimizer("dense", "param", True, ((0,),), ((0,),), (FlatBuffer(("bfloat16", "float32"), 12, {0: 0}),)),
    ),
    args={"lr": 0.5, "params_dtype": torch.bfloat16, "sizes": [1, [2, "three"]], "none": None},
)


def test_an_outline_comes_back_as_it_was() -> None:
    told = replace(OUTLINE, args=_plain_args(Namespace(**(OUTLINE.args or {}), odd=object(), bound=float("inf"))))
    assert RankLayout.from_json(told.to_json()) == OUTLINE
    assert RankLayout.from_json(replace(OUTLINE, args=None, problem="why").to_json()).problem == "why"


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": 1}', '{"format": 1, "place": {"tp": [0]}}', '{"format": 9}']
)
def test_something_else_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="outline"):
        RankLayout.from_json(text)


def test_places_have_megatrons_names() -> None:
    assert OUTLINE.place.directory == "mp_rank_01"
    names = [place.directory for place in Place((1, 2), (0, 2), (0, 1)).all()]
    assert names == ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"]
    assert Place((0, 1), (1, 2), (3, 4)).directory == "mp_rank_00_001_003"
    assert Place((0, 1), (0, 1), (3, 4)).directory == "mp_rank_00_003"


def test_layers_and_experts_are_counted_through_the_whole_model() -> None:
    def tile(key: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> Tile:
        return Tile(key, shape, offsets, (5,), (1,), 0, flexible=False)

    stage = tile("decoder.layers.norm.weight", (4, 5), (3, 0))
    assert _global_name("decoder.layers.1.norm.weight", stage) == ("decoder.layers.3.norm.weight", (3,))
    expert = tile("decoder.layers.mlp.experts.fc1.weight", (4, 8, 5), (2, 7, 0))
    assert _global_name("decoder.layers.0.mlp.local_experts.1.fc1.weight", expert) == (
        "decoder.layers.2.mlp.local_experts.7.fc1.weight",
        (2, 7),
    )
    # the last stage calls the tied embedding otherwise, and layers that differ have names of their own
    assert _global_name("output_layer.weight", tile("embedding.weight", (5,), (0,))) == ("embedding.weight", ())
    # grouped experts: one number in the name, two dimensions in front
    assert _global_name("decoder.layers.0.mlp.experts.weight1", expert) == (expert.key, ())


def test_streams_are_what_the_libraries_own_functions_give() -> None:
    random.seed(5)
    random.gauss(0, 1)
    np.random.seed(6)
    np.random.standard_normal()
    torch.manual_seed(7)
    found = streams_of(b"".join(bytes(part) for part in RngState().capture()))
    assert found["python"] == random.getstate()
    state: Any = np.random.get_state()
    kind, words, *rest = state
    assert (found["numpy"][0], *found["numpy"][2:]) == (kind, *rest)
    assert found["numpy"][1].dtype == words.dtype and (found["numpy"][1] == words).all()
    assert torch.equal(found["torch"], torch.get_rng_state()) and found["device"] is None
    with pytest.raises(CheckpointError):
        streams_of(b"something else")


def test_mapped_tensors_are_apart_and_leave_nothing(tmp_path: Path) -> None:
    with Mapped(tmp_path) as memory:
        one, none, two = (memory.tensor(shape, torch.float32) for shape in ((3, 5), (0, 2), (2000,)))
        assert not one.any() and not two.any() and none.shape == (0, 2)
        one.fill_(1)
        two.fill_(2)
        assert (one == 1).all() and (two == 2).all() and memory.count == 3
        assert one.untyped_storage().nbytes() == one.nbytes
    assert list(tmp_path.iterdir()) == []
