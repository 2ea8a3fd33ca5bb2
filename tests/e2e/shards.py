"""The matrix of jobs with several shards: which rank is killed and when, the expected result, and the actual one.

Four ranks, two shards of two copies each (``zero``: four of one). Jobs have the barrier before the update ("redo"),
pre-images instead ("undo"), or keep second copies ("buddy"). The job of each row has a fault in one phase after the
other, life after life, and then trains to its end. After every version of every life the weights, moments and random
streams of each rank are compared with those of an unbroken run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.forked import ForkedJob
from tests.e2e.harness import Job
from tests.halfway import divisions
from ttp.core.layout import ranks_text

SCRIPT = Path(__file__).with_name("sharded_job.py")
Bits = list[set[str]]
"""For every rank, what it held at each version, in any of its lives: the version and digests."""

KINDS = {
    "hsdp": ((0, 2), (1, 3)),
    "tp": ((0, 2), (1, 3)),
    "pp": ((0, 1), (2, 3)),
    "replicated": ((0, 2), (1, 3)),
    "zero": ((0,), (1,), (2,), (3,)),
}
"""The replica groups of each kind."""

MODES = {"redo": {}, "hosts": {}, "undo": {"JOB_UNDO": "preimage"}, "buddy": {"JOB_BUDDY": "1", "JOB_STEP_S": "0.4"}}
"""And their environment; steps are long enough for a copy. ``hosts`` is redo with the ranks on two hosts."""
EVERY = 2
"""How many versions one second copy is begun after the other."""

PHASES = ("data", "backward", "allreduced", "barrier", "passed", "in_step", "gather", "stepped", "scheduled")
LIFE_S = 240.0


def phases(kind: str, mode: str) -> list[str]:
    """Return the points of a step at which a job of this kind can be killed, except ``halfway``."""
    left_out = {"barrier"} if mode == "undo" else set()
    return [p for p in PHASES if p not in left_out and (p != "gather" or kind == "replicated")]


def victims(kind: str, mode: str) -> dict[str, tuple[int, ...]]:
    """Return the sets of ranks to kill, by name. Survivors hold a copy of each shard, or none of the first shard."""
    if kind == "zero":
        return {"one rank": (2,), "rank 0": (0,)} | ({"a host": (2, 3)} if mode == "buddy" else {})
    one, two = KINDS[kind]
    return {
        "one rank": (one[1],),
        "rank 0": (0,),
        "a column": (one[0], two[0]),
        "one of each shard": (one[0], two[1]),
        "all of a shard": one,
    }


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield kind, mode and killed ranks of all rows of the matrix. Only shards without replicas have second copies.

    On two hosts no row kills all ranks of a host, because there is no launcher that could hand over their pages.
    """
    for kind in KINDS:
        for mode in MODES:
            if mode == "hosts":
                yield from ((kind, mode, who) for who in ("one rank", "one of each shard") if kind in ("hsdp", "tp"))
            elif mode != "buddy" or kind == "zero":
                yield from ((kind, mode, who) for who in victims(kind, mode))


def fault(name: str, phase: str, ranks: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return a fault without its step."""
    return {"id": name, "ranks": list(ranks), "phase": phase, "action": "kill", "together": True, **more}


def halfways(dead: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield a fault for each way to divide the survivors into those that make the update and those that do not."""
    for out, broken in divisions(dead):
        name = f"halfway-{''.join(map(str, out))}-{'broken' if broken else 'hanging'}"
        yield fault(name, "halfway", dead, out=list(out), broken=broken)


def faults_of(kind: str, who: str, mode: str) -> list[dict[str, Any]]:
    """Return the faults of a row, one per launch. They are two versions apart, or as many as second copies need.

    The two stages of one pipeline are never in their backward passes at the same time, so that fault is left out.
    """
    dead = victims(kind, mode)[who]
    never = {"backward"} if (kind, who) == ("pp", "a column") else set()
    action = "lose host" if who == "a host" else "kill"
    faults = [fault(phase, phase, dead, action=action) for phase in phases(kind, mode) if phase not in never]
    if kind != "zero":
        faults += halfways(dead)
    refused = not allowed(kind, {**faults[0], "step": 0}, mode)  # then nothing goes on: each in a job of its own
    first, apart = (2 * EVERY + 1, 2 * EVERY) if mode == "buddy" else (1, 0 if refused else 2)
    return [{**f, "step": first + apart * number} for number, f in enumerate(faults)]


# ---------------------------------------------------------------------------------------------------------- expected


def lost_shards(kind: str, dead: set[int]) -> list[tuple[int, ...]]:
    """Return the shards of which no copy is left."""
    return [group for group in KINDS[kind] if set(group) <= dead]


def allowed(kind: str, hurt: dict[str, Any], mode: str) -> set[int]:
    """Return the versions that may be saved, by Statement 1 or from second copies; empty: the save must be refused.

    Before the dead ranks have sent their last gradient no rank can have updated. After that survivors may have updated
    or
    not; in ``halfway`` it is known which have.
    """
    dead, before = set(hurt["ranks"]), hurt["step"]
    if lost_shards(kind, dead):
        oldest = before - (2 * EVERY - 1)
        return {v for v in range(oldest, before + 2) if v % EVERY == 0} if mode == "buddy" else set()
    if hurt["phase"] in ("data", "backward"):
        return {before}
    if hurt["phase"] != "halfway":
        return {before, before + 1}
    ahead = set(hurt["out"])
    if mode == "undo" and not all(set(group) & ahead for group in KINDS[kind]):
        return {before}
    return {before + 1}


# ---------------------------------------------------------------------------------------------------------------- run


@dataclass
class Row:
    """One row of the matrix: a kind of job, its faults and their outcomes.

    Args:
        kind: the kind of layout.
        who: the ranks that are killed.
        mode: one of ``MODES``.
        outcomes: number of outcomes, by phase.
        problems: what was not as expected.
    """

    kind: str
    who: str
    mode: str
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self, directory: Path, bits: Bits, hurts: list[dict[str, Any]]) -> Row:
        """Inject the faults, launch after launch."""
        chains = [hurts] if allowed(self.kind, hurts[0], self.mode) else [[hurt] for hurt in hurts]
        for number, chain in enumerate(chains):
            self._chain(self._job(directory / f"{number}", chain), bits)
        return self

    def _job(self, directory: Path, chain: list[dict[str, Any]]) -> ForkedJob:
        env = {"JOB_KIND": self.kind, "TTP_BUDDY_EVERY": str(EVERY), **MODES[self.mode]}
        hosts = [*"aabb"] if self.mode in ("buddy", "hosts") else []
        return ForkedJob(directory, steps=chain[-1]["step"] + 3, faults=chain, env=env, hosts=hosts)

    def _chain(self, job: ForkedJob, bits: Bits) -> None:
        for hurt in job.faults:
            try:
                outcome = self._life(job, hurt)
            except AssertionError as problem:
                outcome = "WRONG"
                self.problems.append(f"{self.kind}, {self.who}, {hurt['id']}: {problem}\n{job.story()}")
            self.outcomes.setdefault(hurt["phase"], Counter())[outcome] += 1
        if not any("refused" in outcomes for outcomes in self.outcomes.values()):
            codes = job.live(LIFE_S)
            if codes != [0] * 4:
                self.problems.append(f"{self.kind}, {self.who}: the last life ended with {codes}\n{job.story()}")
        for rank, (mine, theirs) in enumerate(zip(bits_of(job.directory), bits, strict=True)):
            if not mine <= theirs:
                self.problems.append(f"{self.kind}, {self.who}: other bits on rank {rank}: {sorted(mine - theirs)}")

    def _life(self, job: ForkedJob, hurt: dict[str, Any]) -> str:
        """Run one launch with its fault and return the outcome.

        Raises:
            AssertionError: the outcome is not allowed.
        """
        incidents = len(job.incidents())
        codes = job.live(LIFE_S)
        versions = allowed(self.kind, hurt, self.mode)
        survivors = 75 if versions else 70
        assert codes == [-9 if rank in hurt["ranks"] else survivors for rank in range(4)], f"exit codes {codes}"
        events = job.incidents()[incidents:]
        assert len(events) == 1, f"{len(events)} incidents"
        if not versions:
            return _refused(self.kind, hurt, events[0])
        committed = [e["version"] for e in events[0] if e["kind"] == "committed"]
        assert len(committed) == 1 and committed[0] in versions, f"saved {committed}, not one of {versions}"
        newest = max(_newest(job, rank) for rank in range(4) if rank not in hurt["ranks"])
        hows = {how for e in events[0] if e["kind"] == "plan" for how in e.get("how", {}).values()}
        if self.mode == "buddy":
            assert hows == {"kept"} and newest - committed[0] < 2 * EVERY, f"saved {committed[0]} of {newest} as {hows}"
        redo = self.mode in ("redo", "hosts")
        assert not redo or committed[0] >= newest, f"saved {committed[0]}, a survivor had {newest}"
        return " + ".join(["saved", *sorted(hows)])


def _refused(kind: str, hurt: dict[str, Any], events: list[dict[str, Any]]) -> str:
    groups = [ranks_text(group) for group in lost_shards(kind, set(hurt["ranks"]))]
    texts = [e.get("text", "") for e in events]
    told = any(f"has no whole copy left: {group} gave no answer" in text for group in groups for text in texts)
    assert told, f"the reason is not said: {texts}"
    assert not any(e["kind"] == "committed" for e in events), "refused and saved"
    return "refused"


def _newest(job: ForkedJob, rank: int) -> int:
    """Return the newest version that a rank had finished in its last launch."""
    return job.notes(rank)[-1][2]


def bits_of(directory: Path) -> Bits:
    """Return the lines of ``bits<rank>.log`` of each rank."""
    logs = [directory / f"bits{rank}.log" for rank in range(4)]
    return [set(log.read_text().splitlines()) if log.exists() else set() for log in logs]


def assert_same_bits(job: Job, directory: Path, *, every: bool = False) -> None:
    """Check that the job has ended, with the bits of an unbroken run; ``every``: each rank was at each version."""
    for mine, theirs in zip(bits_of(job.directory), unbroken(directory, job.env["JOB_KIND"], job.steps), strict=True):
        assert mine <= theirs and any(line.startswith(f"{job.steps} ") for line in mine), sorted(mine - theirs)
        assert mine == theirs or not every, sorted(theirs - mine)


def unbroken(directory: Path, kind: str, steps: int) -> Bits:
    """Run the job without ttp and return its bits."""
    job = ForkedJob(directory, steps=steps, protected=False, env={"JOB_KIND": kind})
    codes = job.live(LIFE_S)
    assert codes == [0] * 4, job.story()
    return bits_of(directory)
