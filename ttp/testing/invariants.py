"""Check the invariants I1 to I8 against the true state of a simulated job.

====  ==================================================================================================================
I1    a checkpoint has one (incarnation, version), every shard exactly once (``toy.ToyStorage.commit``), and its bits
I2    the saved version is the largest that Statement 1 allows for the copies of the ranks the controller can reach
I3    a rank does not write to its state between its answer to a freeze and the thaw (``sim_rank``)
I4    success is never declared with a torn, short or stale file (``toy.ToyStorage.commit``)
I5    the previous checkpoint stays until the new one exists
I6    every run ends; exit code 70 only if Statement 1 has no plan; launchers never have to kill healthy ranks
I7    the resumed run equals the run without faults, bit for bit
I8    ranks continue in their processes only from a checkpoint that exists, only after deaths, and not if they raised
====  ==================================================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ttp.core import messages as m
from ttp.core.controller.events import Action, Record
from ttp.core.controller.incident import Incident
from ttp.core.controller.machine import ControllerMachine
from ttp.core.controller.membership import Membership
from ttp.core.controller.stand_in import MEANWHILE
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.testing.toy import Checkpoint, InvariantBroken, ToyState

if TYPE_CHECKING:
    from ttp.testing.sim_controller import SimController
    from ttp.testing.sim_rank import SimRank
    from ttp.testing.simulation import Simulation


def largest_version(
    layout: Layout,
    copies: Mapping[Rank, set[Version]],
    written: Mapping[Shard, Version],
    kept: Collection[tuple[Shard, Version]] = (),
) -> Version | None:
    """Return the largest version that Statement 1 allows, computed by trying every version; None if there is none.

    It is the largest version of which every shard has a copy: in a rank, already written, or as a kept second copy.

    Args:
        layout: which ranks hold which shards.
        copies: the versions that each rank can write.
        written: the version of each shard that is already written.
        kept: (shard, version) of the second copies that ranks can supply.
    """
    everything = {v for versions in copies.values() for v in versions} | {*written.values(), *(v for _, v in kept)}
    for version in sorted(everything, reverse=True):
        if all(
            written.get(shard) == version
            or (shard, version) in kept
            or any(version in copies.get(r, ()) for r in ranks)
            for shard, ranks in layout.groups.items()
        ):
            return version
    return None


class Judge:
    """Checks the invariants during one simulation.

    Args:
        world: the simulation.

    The simulation calls the methods; they raise ``InvariantBroken``.
    """

    def __init__(self, world: Simulation) -> None:
        self.approximate = False
        """Whether a rank-local page was lost with its host; from then on equal bits are not promised."""
        self.saved: list[Version] = []
        """Versions of the checkpoints, in the order of their commits."""
        self._world = world
        self._reference = [ToyState.initial(world.layout)]
        self._seen: dict[Version, Checkpoint] = {}

    @property
    def base(self) -> ToyState:
        """The state from which this incarnation started."""
        return self._reference[0]

    def begin(self, start: ToyState) -> None:
        """Begin an incarnation from the state ``start``; ``expected`` computes its later states from there."""
        self._reference = [start]

    def expected(self, version: Version) -> ToyState:
        """Return the state that a run without faults has at ``version``."""
        while self._reference[-1].version < version:
            self._reference.append(self._reference[-1].advanced(self._world.layout))
        return self._reference[version - self.base.version]

    # -------------------------------------------------------------------------------------------------------- decisions

    def controller_acted(self, machine: ControllerMachine, actions: list[Action]) -> None:
        """Check the decisions among the actions of a controller (I2, I4, I6, I8)."""
        records = [action for action in actions if isinstance(action, Record)]
        thaws = any(record.kind == "thawed" for record in records)
        for record in records:
            self._decided(machine, record, thaws=thaws)

    def _decided(self, machine: ControllerMachine, record: Record, *, thaws: bool) -> None:
        meanwhile = machine.stand_in.rescue
        aside = record.incident.endswith(MEANWHILE)
        job = machine.stand_in.job if aside else machine.job
        incident = meanwhile.incident or meanwhile.last if aside else machine.incident or machine.rescue.last
        if incident is None:
            return
        match record.kind:
            case "nothing_new" if thaws and not incident.snapshot:
                pass  # a false alarm: the ranks train on, so versions of ranks that have not answered are not lost
            case "plan" | "nothing_new":
                best = self._best(machine, job, incident, aside=aside)
                if best is not None and best > max(record.facts["version"], self.base.version):
                    raise InvariantBroken(f"I2: version {record.facts['version']} is saved, {best} was possible")
            case "committed":
                version = record.facts["version"]
                if version not in self._world.storage.checkpoints or self._in_memory(version):
                    raise InvariantBroken(f"I4: version {version} is reported as committed but does not exist")
            case "released":
                if aside:
                    raise InvariantBroken("I6: released by a controller that only stands in")
                if record.facts.get("again"):
                    self._released_again(machine, incident)
                self._released(machine, incident, record.facts["exit_code"], record.facts["text"])
            case "thawed":
                if job.in_doubt or job.broken:
                    raise InvariantBroken(f"I6: thawed while ranks {job.broken} cannot train on")

    def _released(self, machine: ControllerMachine, incident: Incident, exit_code: int, text: str) -> None:
        assert incident.draft.plan is not None or exit_code in (64, 70)
        if machine.job.silent and "TTP_OT" not in text:
            raise InvariantBroken(f"I6: released while silent ranks {sorted(machine.job.silent)} are only in doubt")
        if exit_code == 75 or (exit_code == 64 and incident.saved):
            version, again = incident.saved, incident.release is not None and incident.release.again
            if self._in_memory(version) and machine.job.live and not again:
                raise InvariantBroken(f"I4: released with 75, version {version} is held in memory only")
            if version not in self._world.storage.checkpoints and version > 0:
                raise InvariantBroken(f"I4: released with 75, version {version} does not exist")
            return
        best = self._best(machine, machine.job, incident)
        able = machine.job.live - incident.ranks.failures.keys() - _silent(incident)
        if best is not None and best > self.base.version and able and "TTP_OT" not in text:
            raise InvariantBroken(f"I6: given up ({text}) although version {best} was possible")

    def _in_memory(self, version: int) -> bool:
        memory = self._world.memory
        return memory is not None and version in memory.held

    def _released_again(self, machine: ControllerMachine, incident: Incident) -> None:
        if incident.saved not in self._world.storage.checkpoints:
            raise InvariantBroken(f"I8: ranks are to continue from step {incident.saved}, which does not exist")
        # The release asks for no replacements of ranks of other launches.
        launches = {member.hello.launch for member in machine.job.members.values()}
        processes = {r: p for r, p in self._world.ranks.items() if p.alive and p.hello.launch in launches}
        undead = sorted(processes.keys() - machine.job.live)
        if undead:
            raise InvariantBroken(f"I8: ranks {undead} are to be replaced although their processes live")

    def goes_on(self, rank: SimRank) -> None:
        """Check that a rank that continues in its process has not raised (I8)."""
        broken = rank.machine.state.broken
        if broken is not None and broken.kind is not m.FaultKind.COLLECTIVE:
            raise InvariantBroken(f"I8: rank {rank.rank} continues although it raised: {broken.text}")

    def _best(
        self, machine: ControllerMachine, job: Membership, incident: Incident, *, aside: bool = False
    ) -> Version | None:
        """Return the largest version that could be saved, or None if there is none.

        It follows from the true state of every rank that the controller can reach and that is neither failed nor
        silent. Redo and undo count only for a version that some rank has finished and that is not whole without them,
        and only on ranks that offered them in their answers.
        """
        plain: dict[Rank, set[Version]] = {}
        offered: dict[Rank, set[Version]] = {}
        kept: set[tuple[Shard, Version]] = set()
        for rank in job.live - incident.ranks.failures.keys() - _silent(incident):
            process = self._world.ranks[rank]
            stream = process.aside.stream if aside else process.stream
            thawed = stream is None and process.machine.incident != incident.id  # perhaps by another controller
            elsewhere = thawed or (stream is not None and stream.controller.machine is not machine)
            if elsewhere or not process.alive:
                continue
            version, phase = process.truth
            whole = phase in (m.Phase.IDLE, m.Phase.DONE)
            answer = incident.ranks.answers.get(rank)
            if rank in incident.ranks.redoing and answer is not None and answer.version == version:
                continue  # the rank has the order to redo, so it will no longer hold this version
            if whole:
                plain[rank] = {version}
            redoes = whole and not process.trainer.has_left
            offered[rank] = plain.get(rank, set()) | _offers(answer, version, whole, redoes=redoes)
            kept |= _kept(self._world.keepers, answer, self._world.copies(process.host))
        layout, written = self._world.layout, incident.draft.written()
        best = largest_version(layout, plain, written, kept)
        newest = max((v for versions in plain.values() for v in versions), default=None)
        if best is not None and newest is not None and best >= newest:
            return best
        full = largest_version(layout, offered, written, kept)
        return full if best is None else max(best, best if full is None else full)

    def committed(self, version: Version) -> None:
        """Check the checkpoint of ``version``, which was committed now or before (I1, I5)."""
        there = self._world.storage.checkpoints
        if self._seen.keys() - there.keys() and len(there) < self._world.storage.keep:
            raise InvariantBroken(f"I5: checkpoints were deleted: before {sorted(self._seen)}, now {sorted(there)}")
        checkpoint = there[version]
        if self._seen.get(version) is checkpoint:
            return
        self.saved.append(version)
        self._seen = dict(there)
        expected = self.expected(version)
        if checkpoint.shards != expected.shards:
            raise InvariantBroken(f"I1: the shards in checkpoint {version} do not hold the bits of version {version}")
        for rank, word in checkpoint.random.items():
            if expected.random[rank] != word:
                raise InvariantBroken(f"I1: the page of rank {rank} in checkpoint {version} is of another version")

    # -------------------------------------------------------------------------------------------------------------- end

    def operator_came(self, controller: SimController | None, rank: SimRank) -> None:
        """Check, when an operator reports a hanging rank, that the controller could not have noticed the hang (I6)."""
        heard = any(r.alive and not r.stopped for r in self._world.ranks.values())
        if controller is None or controller.machine.stage != "training" or not heard:
            return
        if any(member.done for member in controller.machine.job.members.values()):
            return  # a rank that left its loop may wait for another rank's last evaluation: no hang detection then
        patience_s = controller.machine._parts.hangs.patience_s
        if patience_s is not None:
            raise InvariantBroken(
                f"I6: rank {rank.rank} hangs and the controller did not notice; patience {patience_s:.3f} s"
            )

    def needed_the_launcher(self, ranks: Sequence[SimRank]) -> None:
        """Check the ranks that are left long after the first death: they are stopped, or have trained nothing (I6)."""
        left = {r.rank: r.truth for r in ranks if r.alive and not r.stopped}
        if any(version > self.base.version for version, _ in left.values()):
            raise InvariantBroken(f"I6: ranks {left} are never released")

    def trained(self, ranks: Mapping[Rank, SimRank]) -> None:
        """Check the final states of a job in which every rank ended with exit code 0 (I7)."""
        final = self.expected(Version(self._world.steps))
        if not self.approximate:
            state = ToyState.initial(self._world.layout)
            for _ in range(self._world.steps):
                state = state.advanced(self._world.layout)
            if state != final:
                raise InvariantBroken("I7: the final state differs from that of a run without faults")
        for rank in ranks.values():
            trainer = rank.trainer
            if trainer.random != final.random[rank.rank] or any(
                final.shards[s] != w for s, w in trainer.shards.items()
            ):
                raise InvariantBroken(f"I7: the final state of rank {rank.rank} differs from the expected one")


def _silent(incident: Incident) -> set[Rank]:
    return set(incident.evidence.against(m.FaultKind.SILENT))


def _kept(
    keepers: Mapping[Rank, Sequence[Shard]], answer: m.Frozen | None, there: Collection[tuple[Rank, Version]]
) -> set[tuple[Shard, Version]]:
    """Return (shard, version) of the second copies that a rank offered in its answer and that still exist."""
    if answer is None or not (answer.final and answer.kept):
        return set()
    found = (copy for copy in answer.kept if (copy.of, copy.version) in there)
    return {(shard, copy.version) for copy in found for shard in keepers.get(copy.of, ())}


def _offers(answer: m.Frozen | None, version: Version, whole: bool, *, redoes: bool) -> set[Version]:
    """Return the versions that a rank at ``version`` offered to reach by redo or undo."""
    if answer is None or not answer.final or answer.version != version:
        return set()
    offers: set[Version] = set()
    if answer.has_gradient and redoes:
        offers.add(Version(version + 1))
    if answer.has_preimage:
        offers.add(Version(version - 1) if whole else version)
    return offers
