"""Unchanged Megatron-LM under ``ttp run``: a rank is killed, the job is saved and resumed, and Megatron reads the
checkpoint without ttp.

Its ``pretrain`` is in no package: ``MEGATRON_LM`` names a checkout of the tag ``core_v0.16.1``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.harness import Job
from ttp.adapters.megatron import offer_to_megatron

pytestmark = [
    pytest.mark.xdist_group("megatron"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
    pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM"),
]

RANKS, ITERATIONS, KILLED_AT, PATIENCE_S = 4, 5, 3, 900.0
ARGS = """
--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 --num-workers 0
--distributed-backend gloo --use-cpu-initialization --transformer-impl local --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion --no-persist-layer-norm
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--no-create-attention-mask-in-dataloader --micro-batch-size 1 --global-batch-size 8 --hidden-dropout 0 --bf16
--lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 6 --lr-warmup-iters 2
--log-interval 1 --eval-iters 0 --eval-interval 1000 --save-interval 1000
--use-distributed-optimizer --num-distributed-optimizer-instances 2 --tensor-model-parallel-size 2
"""


class Pretraining(Job):
    """A job of Megatron-LM in one directory."""

    def noted(self, rank: int) -> list[tuple[int, int, str, str, int]]:
        """Return launch, version, state, random streams and consumed samples, in their order."""
        lines = (line.split() for line in (self.directory / f"rank{rank}.log").read_text().splitlines())
        return [(int(life), int(version), state, rng, int(seen)) for life, version, state, rng, seen in lines]


def pretrain(directory: Path, *more: str, kill: str = "", plain: bool = False) -> Pretraining:
    """Run a job to its end, with a kill if ``kill`` names one."""
    env = {"LM_ARGS": " ".join([*ARGS.split(), "--train-iters", str(ITERATIONS), *more]), "TORCHDYNAMO_DISABLE": "1"}
    env |= (
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        | ({"LM_KILL": kill} if kill else {})
        | ({"LM_PLAIN": "1"} if plain else {})
    )
    script = Path(__file__).with_name("pretrain_lm.py")
    job = Pretraining(directory, ranks=RANKS, script=script, env=env, max_restarts=1, protected=not plain)
    try:
        assert job.run(PATIENCE_S) == 0, job.story()
    finally:
        job.stop()
    return job


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> Pretraining:
    return pretrain(tmp_path_factory.mktemp("unhurt"), plain=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Pretraining:
    return pretrain(tmp_path_factory.mktemp("killed"), kill=f"1:{KILLED_AT}")


def test_it_goes_on_as_if_nothing_had_happened(killed: Pretraining, unhurt: Pretraining) -> None:
    assert killed.committed() == [KILLED_AT]
    for rank in range(RANKS):
        known = {version: told for _, version, *told in unhurt.noted(rank)}
        assert sorted(known) == list(range(ITERATIONS + 1))
        seen = killed.noted(rank)
        assert [(life, version) for life, version, *_ in seen] == [
            *((0, version) for version in range(KILLED_AT + 1)),
            *((1, version) for version in range(KILLED_AT, ITERATIONS + 1)),
        ]
        for life, version, *told in seen:
            assert told == known[version], (rank, life, version)


def test_it_reads_what_was_saved_without_ttp(killed: Pretraining, unhurt: Pretraining, tmp_path: Path) -> None:
    (saved,) = (killed.directory / "checkpoints").glob(f"tft_saved_*step_{KILLED_AT}")
    offer_to_megatron(saved, tmp_path / "load")
    arguments = ["--load", str(tmp_path / "load"), "--ckpt-format", "torch_dist", "--no-load-rng"]
    loaded = pretrain(tmp_path / "job", *arguments, plain=True)
    for rank in range(RANKS):
        known = {version: (state, samples) for _, version, state, _, samples in unhurt.noted(rank)}
        seen = [(version, (state, samples)) for _, version, state, _, samples in loaded.noted(rank)]
        assert [version for version, _ in seen] == list(range(KILLED_AT, ITERATIONS + 1))
        assert seen[0][1] == known[KILLED_AT], rank
