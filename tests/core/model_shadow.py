"""The model of ``model_keep``, where a checkpoint is held in memory first and another process makes it durable.

``State.committed`` is what can be restored, ``State.held`` the part of it that is in memory only. The writer process
may copy it to the storage at any time; time may pass before that if no rank waits for it. A newer checkpoint on the
storage replaces the held one. Memory may refuse a save or a commit, and the storage may refuse the writer's copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.core.model_keep import KeepModel
from tests.core.model_state import Broken, State, put, story
from ttp.core import messages as m
from ttp.core.controller.events import Record
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import Layout, Version
from ttp.core.rank import events as ev

MEMORY = "/memory"


class ShadowModel(KeepModel):
    """A model in which checkpoints are held in memory first; see the module.

    Args:
        layout: the job's layout.
        kills: number of ranks that may be killed.
        refusals: number of times that memory or storage may refuse a write.
        more: as for ``KeepModel``.
    """

    def __init__(self, layout: Layout, kills: int, *, refusals: int = 0, **more: Any) -> None:
        super().__init__(layout, kills, **more)
        self.refusals = refusals
        self.went_on_from_memory = False

    def _start(self) -> State:
        return super()._start()._replace(refusals=self.refusals)

    def _seen(self, state: State, r: int) -> ev.Quiet:
        held = max(state.held, default=Version(0))
        return replace(super()._seen(state, r), hold_dir="" if held else MEMORY, held=held)

    def _moves(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        yield from super()._moves(state, path)
        if state.held:
            yield "what is held is durable now", state._replace(held=frozenset())

    def _save(self, state: State, r: int, path: Any) -> Iterator[tuple[str, State]]:
        order = state.jobs[r][0] if state.jobs[r] else None
        refused = state._replace(refusals=state.refusals - 1, jobs=put(state.jobs, r, state.jobs[r][1:]))
        if isinstance(order, (m.Save, m.Commit)) and order.directory and state.refusals:
            kind: Any = m.SaveFailed if isinstance(order, m.Save) else m.CommitFailed
            failed = ev.Worked(kind(order.rank, order.incident, order.generation, "no memory", may_pass=True))
            yield f"memory refuses {r}", self._processor(refused, r, failed)
        if isinstance(order, m.Commit) and not order.directory and {p.file for p in order.pieces} <= state.in_memory:
            yield from self._awaits(state, refused, r, order)
            return
        for name, after in super()._save(state, r, path):
            if isinstance(order, m.Save) and order.directory:
                new = {file for file, _, _ in after.durable - state.durable}
                yield name, after._replace(in_memory=after.in_memory | new)
            elif isinstance(order, m.Commit) and order.directory:
                yield name, after._replace(held=after.held | {order.version})
            elif isinstance(order, m.Commit):
                yield name, after._replace(held=frozenset(v for v in after.held if v > order.version))
            else:
                yield name, after

    def _awaits(self, state: State, refused: State, r: int, order: m.Commit) -> Iterator[tuple[str, State]]:
        """Yield the moves of a rank that waits until the held checkpoint is durable."""
        if order.version not in state.held:
            done = ev.Worked(m.Committed(order.rank, order.incident, order.generation, "path", 1))
            left = state._replace(jobs=put(state.jobs, r, state.jobs[r][1:]))
            yield f"{r} sees that it is durable", self._processor(left, r, done)
            return
        yield "the storage is through with what is held", state._replace(held=frozenset())
        if state.refusals:
            failed = ev.Worked(m.CommitFailed(order.rank, order.incident, order.generation, "disk full", may_pass=True))
            yield f"the storage refuses what {r} waits for", self._processor(refused, r, failed)

    def _check_decision(self, state: State, place: int, record: Record, path: Any) -> None:
        super()._check_decision(state, place, record, path)
        machine: ControllerMachine = self.machines.look(state.controllers[place])
        incident = machine.incident or machine.rescue.last
        if incident is None or not machine.job.live or incident.saved not in state.held:
            return
        again = record.facts.get("again", False)
        self.went_on_from_memory |= again
        if record.kind == "nothing_new" or (record.facts.get("exit_code") == 75 and not again):
            raise Broken(f"K6: {record.facts}, but {set(state.held)} is held only {story(path)}")
