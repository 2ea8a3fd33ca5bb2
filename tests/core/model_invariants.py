"""The invariants of every state of the model check: I1, I2, I4 and I6 of the design; see ``model``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.core.machines import Machines
from tests.core.model_state import Broken, State, deadline_of, incident_of, story
from tests.core.oracle import best
from ttp.core import messages as m
from ttp.core.answer import Answer
from ttp.core.controller.events import Record
from ttp.core.controller.incident import Incident
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import Layout, Rank, Shard, Version


class Invariants:
    """Asserts the invariants for ``Model``, whose state it reads."""

    layout: Layout
    machines: Machines
    world: int
    rival: bool
    late: bool
    kept: tuple[tuple[Shard, Version], ...]
    outcomes: set[tuple[int | None, ...]]
    hows: set[str]
    """What savers were told to do first."""
    not_redone = 0
    """Orders to make an update that came to a rank which had left the gate."""
    _cuts: list[list[Shard]]

    def _check_decision(self, state: State, place: int, record: Record, path: Any) -> None:
        machine: ControllerMachine = self.machines.look(state.controllers[place])
        incident = machine.incident or machine.rescue.last
        if incident is None:
            return
        self.hows.update(record.facts.get("how", {}).values())
        possible = self._possible(state, machine.job.live - self._elsewhere(state, place, incident), incident)
        saved = max((record.facts.get("version", 0), incident.saved))
        if record.kind != "released" and possible is not None and possible > saved:
            raise Broken(f"I2: {record.facts} while {possible} was possible {story(path)}")
        if record.kind == "released" and record.facts["exit_code"] == 70 and possible is not None:
            raise Broken(f"I6: {record.facts} while {possible} was possible {story(path)}")
        if record.kind == "released" and record.facts["exit_code"] == 75 and incident.saved not in self._on_disk(state):
            raise Broken(f"I4: {record.facts}, but {state.committed} is on disk {story(path)}")

    def _check_tick(self, state: State, place: int, path: Any) -> None:
        """Check that a controller has done what was due: it would be called again and again at the same time."""
        due = self.machines.ask(state.controllers[place], deadline_of)
        if due is not None and due <= state.now:
            raise Broken(f"I6: at {state.now} s nothing is done that was due at {due} s {story(path)}")

    def _on_disk(self, state: State) -> set[Version]:
        return set(state.committed)

    def _elsewhere(self, state: State, place: int, incident: Incident) -> set[Rank]:
        """Return ranks of the other controller, and ranks that it has thawed and that are not connected now."""
        over = {Rank(r) for r, stream in enumerate(state.streams) if stream and stream % 2 != place}
        if self.rival:
            alone = (r for r, stream in enumerate(state.streams) if not stream and state.ranks[r])
            over |= {Rank(r) for r in alone if self.machines.ask(state.ranks[r], incident_of) != incident.id}
        return over

    def _possible(self, state: State, live: set[Rank], incident: Incident) -> int | None:
        """Return the newest version to save. Redo and undo count only if no finished version is whole without them."""
        alive = [r for r in sorted(live) if state.ranks[r] and not state.gates[r].updating]
        copies = [Answer(r, state.gates[r].version, kept=self.kept) for r in alive]
        plain = best(self.layout, copies)
        if plain is not None and plain >= max(a.version for a in copies):
            return plain
        full = best(self.layout, [self._offered(state, incident, copy) for copy in copies])
        return full if plain is None else max(plain, plain if full is None else full)

    @staticmethod
    def _offered(state: State, incident: Incident, copy: Answer) -> Answer:
        said = incident.ranks.answers.get(copy.rank)
        if said is None or not said.final or said.version != copy.version:
            return copy
        has_gradient = said.has_gradient and not state.gates[copy.rank].away
        return replace(copy, has_gradient=has_gradient, has_preimage=said.has_preimage)

    def _check_commit(self, state: State, order: m.Commit, path: Any) -> None:
        content = {(f, s): v for f, s, v in state.durable}
        shards = [p.shard for p in order.pieces if p.kind == "shard"]
        if not any(sorted(shards) == sorted(names) for names in self._cuts):
            raise Broken(f"I1: {shards} are committed {story(path)}")
        if len({p.cut for p in order.pieces if "#" in p.shard}) > 1:
            raise Broken(f"I1: parts that do not fit together are committed {story(path)}")
        for piece in order.pieces:
            if content.get((piece.file, Shard(piece.shard))) != order.version:
                raise Broken(f"I1: {piece} is not of version {order.version} {story(path)}")

    def _check_end(self, state: State, path: Any) -> None:
        self.outcomes.add(state.exits)
        if not any(state.exits) and any(g.closed for g in state.gates):
            raise Broken(f"I6: a healthy job stays frozen {story(path)}")
        left = [r for r in range(self.world) if state.exits[r] is None]
        killed = -9 in state.exits
        if any(state.exits) and left:
            raise Broken(f"I6: ranks {left} are never released {story(path)}")
        if not killed and not self.late and not self.rival and any(state.exits):
            raise Broken(f"I6: healthy ranks were released {story(path)}")
