"""The model of ``model`` with second streams: ranks that hear nothing of their controller have another one save.

Additional events: a rank finds its controller silent and opens a second stream to the rival, which arrives or not; it
hears the controller again; a second stream breaks; orders and reports arrive on it. Streams, controllers and ranks are
lost as before, so takeovers happen at every point of the rival's save.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from tests.core.model import Model
from tests.core.model_state import END, Broken, State, put, story
from ttp.core import messages as m
from ttp.core.controller.events import Record
from ttp.core.controller.machine import ControllerMachine
from ttp.core.controller.stand_in import MEANWHILE
from ttp.core.layout import Layout
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev

OPENING = -1
"""Of a second stream that is on its way."""
PLACE = 1
"""Of the rival, which stands in."""


class AsideModel(Model):
    """A model in which ranks do not hear their controller for a while; see the module.

    Args:
        layout: the job's layout.
        kills: number of ranks that may be killed.
        silent: ranks that may stop hearing their controller, once.
        hear: they may hear it again while it lives.
        more: as for ``Model``.
    """

    def __init__(self, layout: Layout, kills: int, *, silent: Collection[int], hear: bool = True, **more: Any) -> None:
        super().__init__(layout, kills, rival=True, **more)
        self.silent, self.hear = silent, hear
        self.meanwhile: set[str] = set()
        """What controllers that stand in have decided."""
        self.taken_over: set[str] = set()
        """What controllers that lead have decided after one of those was durable."""
        self.deferred = False
        """A takeover has waited for a checkpoint that was made meanwhile."""

    def _start(self) -> State:
        none: tuple[tuple[Any, ...], ...] = ((),) * self.world
        silent = tuple(r in self.silent for r in range(self.world))
        return super()._start()._replace(asides=(0,) * self.world, aside_down=none, silent=silent)

    # ------------------------------------------------------------------------------------------------------------ moves

    def _moves(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        for r in range(self.world):
            if not state.ranks[r]:
                continue
            if state.asides[r] == OPENING:
                yield f"the second stream of {r} is up", self._aside_up(state, r)
            if state.aside_down[r]:
                yield f"order aside for {r} arrives", self._obey_aside(state, r)
            if state.silent[r] and state.streams[r] and not state.asides[r]:
                fewer = state._replace(silent=put(state.silent, r, False))
                yield f"{r} hears nothing of its controller", self._processor(fewer, r, ev.Looked(1e9))
            if state.asides[r] and self.hear:
                yield f"{r} hears something of its controller", self._processor(state, r, ev.Looked(0.0))
            if state.asides[r] and state.breaks:
                fewer = state._replace(breaks=state.breaks - 1)
                yield f"the second stream of {r} breaks", self._aside_lost(fewer, r)
        yield from super()._moves(state, path)

    def _time(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        if OPENING not in state.asides and not any(state.aside_down):
            yield from super()._time(state, path)

    def _obey_aside(self, state: State, r: int) -> State:
        order, left = state.aside_down[r][0], state.aside_down[r][1:]
        return self._processor(state._replace(aside_down=put(state.aside_down, r, left)), r, ev.AsideOrder(order))

    def _aside_up(self, state: State, r: int) -> State:
        if not state.controllers[PLACE]:
            return self._processor(state._replace(asides=put(state.asides, r, 0)), r, ev.AsideDown("nobody answers"))
        state, stream = state.new_stream(r, PLACE)
        return self._processor(state._replace(asides=put(state.asides, r, stream)), r, ev.AsideUp())

    def _aside_lost(self, state: State, r: int) -> State:
        return self._processor(_cut(state, r, keep=False), r, ev.AsideDown("broken"))

    def _forgotten(self, state: State, place: int) -> State:
        for r in range(self.world):
            if place == PLACE and state.ranks[r] and state.asides[r] > 0:
                state = self._aside_lost(state, r)
        return super()._forgotten(state, place)

    # --------------------------------------------------------------------------------------------------------- machines

    def _controller(self, state: State, place: int, event: Any, path: Any) -> State:
        state = super()._controller(state, place, event, path)
        self.deferred |= self.machines.ask(state.controllers[place], _deferred)
        while self.eager and any(state.aside_down):
            state = self._obey_aside(state, next(r for r in range(self.world) if state.aside_down[r]))
        return state

    def _processor(self, state: State, r: int, event: ev.Event) -> State:
        state = super()._processor(state, r, event)
        return state if state.exits[r] is None else _cut(state, r, keep=True)

    def _perform(self, state: State, r: int, action: act.Action, inbox: deque[ev.Event]) -> State:
        match action:
            case act.ConnectAside():
                return state._replace(asides=put(state.asides, r, OPENING))
            case act.CloseAside():
                return _cut(state, r, keep=True)
            case act.SendAside(report):
                if isinstance(report, m.Frozen) and report.final:
                    state = state.at_gate(r, acked=True)
                return state._replace(up=put(state.up, r, (*state.up[r], (state.asides[r], report))))
        return super()._perform(state, r, action, inbox)

    def _faults(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        for name, after in super()._faults(state, r):
            yield name, after if after.ranks[r] else _cut(after, r, keep="unheard" not in name)

    # ------------------------------------------------------------------------------------------------------- invariants

    def _check_decision(self, state: State, place: int, record: Record, path: Any) -> None:
        if not record.incident.endswith(MEANWHILE):
            if self._on_disk(state):
                self.taken_over.add(record.kind)
            super()._check_decision(state, place, record, path)
            return
        self.meanwhile.add(record.kind)
        if record.kind == "released":
            raise Broken(f"I6: released by a controller that only stands in {story(path)}")
        machine: ControllerMachine = self.machines.look(state.controllers[place])
        meanwhile = machine.stand_in
        incident = meanwhile.rescue.incident or meanwhile.rescue.last
        assert incident is not None
        here = {rank for rank in meanwhile.job.live if state.asides[rank] > 0}
        possible = self._possible(state, here, incident)
        if possible is not None and possible > record.facts["version"]:
            raise Broken(f"I2: {record.facts} while {possible} was possible {story(path)}")


def _deferred(machine: ControllerMachine) -> bool:
    return machine.incident is not None and machine.incident.deferred


def _cut(state: State, r: int, *, keep: bool) -> State:
    """End the second stream of a rank. With ``keep`` reports that were sent on it arrive."""
    stream = state.asides[r]
    if not stream:
        return state
    said = tuple(s for s in state.up[r] if keep or s[0] != stream)
    end = ((stream, END),) if stream > 0 else ()
    return state._replace(
        asides=put(state.asides, r, 0), up=put(state.up, r, (*said, *end)), aside_down=put(state.aside_down, r, ())
    )
