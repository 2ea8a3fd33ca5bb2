"""Runs a megatron-core job in one directory, launch after launch under ttp, and compares its states for a test."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.adapters.megatron.nursery import Nursery

STEPS = 5
KILLED_AT = 3  # updates that are finished by then

TP2_DP2 = {"tp": 2, "instances": 2}
DP4 = {"instances": 2}
SCALED = {"scaled": True}
"""With what FP8 adds to a model."""
PP2_DP2 = {"pp": 2, "instances": 2, "layers": 4}
VIRTUAL = {"pp": 2, "virtual": 2, "instances": 2, "layers": 4}
EP2_DP2 = {"ep": 2, "instances": 2, "experts": True}


class Job:
    """A job of four ranks.

    Args:
        nursery: where the ranks come from.
        directory: for everything that the job writes.
        shape: see ``gpt.Shape``.
    """

    def __init__(self, nursery: Nursery, directory: Path, shape: dict[str, Any]) -> None:
        self.nursery, self.directory, self.shape = nursery, directory, shape

    @property
    def save_dir(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the version at which the job was killed."""
        return self.save_dir / f"tft_saved_checkpoints-step_{KILLED_AT}"

    def versions(self) -> list[str]:
        return [path.name for path in sorted(self.save_dir.glob("tft_saved_*"))]

    def live(self, life: int, **how: Any) -> list[int]:
        """Run one launch under ttp, with a controller of its own, and return exit codes; see ``worlds.job``."""
        env = {"TTP_TOKEN": "a secret", "MASTER_ADDR": "127.0.0.1", "TTP_OT": "60"}
        env |= {"TTP_RUN_DIR": str(self.directory / f"run{life}"), "TORCHELASTIC_RESTART_COUNT": str(life)}
        env |= how.pop("env", {})
        settings = {"steps": STEPS, **how}
        return self.nursery.run(
            self.directory, "job", env=env, controller=True, shape=self.shape, life=life, **settings
        )

    def starts(self) -> list[int]:
        """Return the version at which each launch began."""
        lines = (line.split() for line in (self.directory / "rank0.log").read_text().splitlines())
        return [int(words[2]) for words in lines if words[1] == "start"]

    def seen(self, rank: int, life: int | None = None) -> dict[int, set[str]]:
        """Return what a rank held at each version that it finished, in one launch or in all; see ``worlds.bits``."""
        found: dict[int, set[str]] = {}
        for words in (line.split() for line in (self.directory / f"rank{rank}.log").read_text().splitlines()):
            if words[1] == "version" and life in (None, int(words[0])):
                found.setdefault(int(words[2]), set()).add(words[3])
        return found

    def kill(self, dead: list[int], phase: str, undo: str | None = None, through: str = "protect") -> None:
        """Run a first launch in which these ranks are killed in one step and the others save."""
        codes = self.live(0, fault={"ranks": dead, "step": KILLED_AT, "phase": phase}, undo=undo, through=through)
        assert codes == [-9 if rank in dead else 75 for rank in range(4)], self.story()

    def state(
        self, name: str, shape: dict[str, Any] | None = None, ranks: int = 4, **how: Any
    ) -> dict[str, torch.Tensor]:
        """Return the global tensors of a job without ttp, by name; see ``worlds.state``."""
        self.run_state(name, shape, ranks, **how)
        return dict(assembled(self.directory / f"{name}.{rank}.pt" for rank in range(ranks)))

    def run_state(self, name: str, shape: dict[str, Any] | None = None, ranks: int = 4, **how: Any) -> None:
        """Run such a job without comparing its ranks, whose weights differ if they are not gathered yet."""
        codes = self.nursery.run(
            self.directory, "state", ranks=ranks, name=name, shape=self.shape if shape is None else shape, **how
        )
        assert codes == [0] * ranks, self.story()

    def unhurt(self) -> dict[str, torch.Tensor]:
        """Return the state that the checkpoint should hold. The job then ran to its end and left its summaries."""
        return self.state("unhurt", steps=KILLED_AT)

    def summary(self, name: str, rank: int) -> dict[str, str]:
        """Return a rank's summary of a state."""
        return dict(torch.load(self.directory / f"{name}.{rank}.pt", weights_only=True)["summary"])

    def after(self, name: str, rank: int) -> dict[str, str]:
        """Return a rank's summary at the end of the job of a state."""
        return dict(json.loads((self.directory / f"{name}.{rank}.json").read_text()))

    def assert_resumed_as_unhurt(self) -> None:
        """Check that the second launch ended like the job without a fault."""
        for rank in range(4):
            resumed = json.loads((self.directory / f"result{rank}.json").read_text())
            never_hurt = self.after("unhurt", rank)
            different = {name for name, value in resumed.items() if value != never_hurt[name]}
            assert not different, (rank, [(resumed[name], never_hurt[name]) for name in sorted(different)])

    def story(self) -> str:
        """Return the output of the ranks."""
        outputs = sorted(self.directory.glob("rank*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in outputs)


def assembled(files: Iterator[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield global tensors from the boxes of all ranks. Copies of a box have to be equal, and no box may be missing."""
    whole: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for file in files:
        for key, shape, offset, box in torch.load(file, weights_only=True)["boxes"]:
            target = whole.setdefault(key, torch.full(shape, torch.nan))
            front = len(shape) - box.dim()
            inner = tuple(slice(o, o + s) for o, s in zip(offset[front:], box.shape, strict=True))
            place = (*offset[:front], *inner)
            known = seen.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            assert torch.equal(target[place][known[place]], box.float()[known[place]]), (key, offset)
            target[place], known[place] = box.float(), True
    for key, known in seen.items():
        assert known.all(), key
        yield key, whole[key]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Compare every element of every weight and moment."""
    assert one.keys() == other.keys()
    assert any("exp_avg_sq" in key for key in one)
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


_OTHERWISE = {
    "local_experts": "experts",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""What the checkpoint calls some of the model's tensors: specs with and without fused layers read each other."""


def _key_of(name: str, known: Container[str]) -> str:
    for mine, theirs in _OTHERWISE.items():
        name = name if name in known else name.replace(mine, theirs)
    return name


def assert_whole(unhurt: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Compare every weight and moment of a file with the job's tensors, which hold all layers or experts."""
    seen: dict[str, torch.Tensor] = {key: torch.zeros(value.shape, dtype=torch.bool) for key, value in unhurt.items()}
    for name, weight in state["model"].items():
        steps = name.split(".")
        numbers = tuple(int(step) for step in steps if step.isdecimal())
        key = _key_of(".".join(step for step in steps if not step.isdecimal()), unhurt)
        states = state["optim"]["state"].get(name, {})  # a frozen one has none
        held = {f"optimizer.state.{what.removeprefix('fp32_')}.{key}": value for what, value in states.items()}
        if (main := f"optimizer.state.param.{key}") in unhurt:
            held.setdefault(main, weight)  # a parameter in fp32 may be its own fp32 copy
        for full, value in {key: weight, **held}.items():
            if not full.startswith("optimizer.state.step"):
                assert torch.equal(value.float(), unhurt[full][numbers]), (name, full)
                seen[full][numbers] = True
    missing = {key for key, known in seen.items() if not known.all()}
    assert not missing, missing
