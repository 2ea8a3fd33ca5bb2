"""A rank's description of the names of its tensors, and the names of the whole model that follow from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ttp.adapters.megatron import contents
from ttp.adapters.megatron.contents import _global_name
from ttp.adapters.megatron.geometry import TensorView
from ttp.adapters.megatron.rank_layout import ModelPlace, OptimizerGroups, RankLayout
from ttp.adapters.megatron.stock import JOB_KEY
from ttp.adapters.torch.saving.checkpoint import write_shard
from ttp.adapters.torch.saving.job_state import JobState
from ttp.core.layout import Rank, Shard
from ttp.errors import CheckpointError

TILE = TensorView("decoder.layers.mlp.weight", (4, 8, 3), (2, 4, 0), (4, 3), (3, 1), 0, flexible=True)
LAYOUT = RankLayout(
    place=ModelPlace((1, 2), (0, 1), (0, 1)),
    tensors=(TILE,),
    chunks=({"decoder.layers.0.mlp.weight": 0},),
    optimizers=(OptimizerGroups("dense", ((0,),)),),
)
FORMAT_1 = {
    "format": 1,
    "place": {"tp": [1, 2], "pp": [0, 1], "ep": [0, 1]},
    "ranks": [1, 3],
    "streams": [1],
    "tensors": [
        {
            "dtype": "bfloat16",
            "shape": [4, 3],
            "tiles": [
                {
                    "key": "decoder.layers.mlp.weight",
                    "shape": [4, 8, 3],
                    "offsets": [2, 4, 0],
                    "sizes": [4, 3],
                    "strides": [3, 1],
                    "first": 0,
                    "flexible": True,
                }
            ],
        }
    ],
    "chunks": [{"decoder.layers.0.mlp.weight": 0, "mlp._extra_state": "key/shard_0_1", "absent": None}],
    "optimizers": [
        {
            "kind": "dense",
            "main_key": "param",
            "scaled": True,
            "groups": [[0]],
            "halves": [[0]],
            "buffers": [{"dtypes": ["bfloat16", "float32"], "numel": 12, "starts": {"0": 0}}],
        }
    ],
    "args": {"lr": 0.5, "params_dtype": {"torch.dtype": "bfloat16"}},
    "problem": "",
}
"""What a ttp that made Megatron's legacy layout has written."""


def test_ranks_that_update_different_tensors_have_one_key_and_a_layout_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a conversion lacks the moments that only the second rank has."""
    both = [LAYOUT, replace(LAYOUT, optimizers=(OptimizerGroups("dense", ((),)),))]
    pieces = [
        write_shard(tmp_path, f"{n}", {one.key: [one.to_json()]}, shard=Shard(f"s{n}"), writer=Rank(n))
        for n, one in enumerate(both)
    ]
    manifest = SimpleNamespace(framework="megatron", pieces=pieces)
    monkeypatch.setattr(contents, "Manifest", SimpleNamespace(load=lambda _: manifest))
    monkeypatch.setattr(contents, "read_megatron_job", lambda *_: JobState(1, extra={JOB_KEY: {}}))
    assert contents.MegatronCheckpoint(tmp_path).rank_layouts() == both


def test_that_of_an_earlier_version_is_read() -> None:
    assert RankLayout.from_json(json.dumps(FORMAT_1)) == LAYOUT


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": 1}', '{"format": 1, "place": {"tp": [0]}}', '{"format": 9}']
)
def test_something_else_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="layout"):
        RankLayout.from_json(text)


def test_layers_and_experts_are_counted_through_the_whole_model() -> None:
    def view(key: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> TensorView:
        return TensorView(key, shape, offsets, (5,), (1,), 0, flexible=False)

    stage = view("decoder.layers.norm.weight", (4, 5), (3, 0))
    assert _global_name("decoder.layers.1.norm.weight", stage) == ("decoder.layers.3.norm.weight", (3,))
    expert = view("decoder.layers.mlp.experts.fc1.weight", (4, 8, 5), (2, 7, 0))
    assert _global_name("decoder.layers.0.mlp.local_experts.1.fc1.weight", expert) == (
        "decoder.layers.2.mlp.local_experts.7.fc1.weight",
        (2, 7),
    )
    # the last stage calls the tied embedding otherwise, and layers that differ have names of their own
    assert _global_name("output_layer.weight", view("embedding.weight", (5,), (0,))) == ("embedding.weight", ())
    # grouped experts: one number in the name, two dimensions in front
    assert _global_name("decoder.layers.0.mlp.experts.weight1", expert) == (expert.key, ())
