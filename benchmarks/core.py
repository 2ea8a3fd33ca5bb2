"""The decision core: begin and end of an update at the gate, ``decide``, and freeze with ``decide``."""

from __future__ import annotations

import statistics
import time

from benchmarks.result import Result, median_of
from ttp.core import messages as m
from ttp.core.answer import Answer
from ttp.core.controller import events as ce
from ttp.core.controller.machine import ControllerMachine
from ttp.core.decide import Plan, decide
from ttp.core.layout import Layout, Rank, Version
from ttp.core.layout_messages import LayoutPart, TellLayout, in_parts
from ttp.processor.gate.gate import Gate
from ttp.testing import toy


def run(quick: bool) -> list[Result]:
    """Measure the gate, ``decide`` for several numbers of ranks, and freeze with ``decide``."""
    sizes = (1_000,) if quick else (1_000, 10_000, 100_000)
    budgets = {100_000: 1_000.0}
    return [begin_end(), *(decide_once(n, budgets.get(n)) for n in sizes), freeze_and_decide(1_000)]


def begin_end() -> Result:
    """Measure how long the training thread takes to pass the gate: begin and end of an update."""
    gate, loops = Gate(), 1_000
    samples = []
    for _ in range(200):
        begin = time.perf_counter_ns()
        for _ in range(loops):
            gate.begin_update()
            gate.end_update()
        samples.append((time.perf_counter_ns() - begin) / 1e3 / loops)
    value, p90 = median_of(samples)
    return Result("begin + end of an update, core", value, "us", 1.5, "200 x 1000 pairs", p90)


def decide_once(ranks: int, budget_ms: float | None) -> Result:
    """Measure one decision for a job of ``ranks`` data-parallel ranks."""
    layout = Layout.data_parallel(ranks)
    answers = [Answer(Rank(r), Version(7), host=f"host{r // 8}") for r in range(1, ranks)]
    samples = []
    for _ in range(5):
        begin = time.perf_counter_ns()
        assert isinstance(decide(layout, answers), Plan)
        samples.append((time.perf_counter_ns() - begin) / 1e6)
    return Result(f"decide, {ranks} ranks", statistics.median(samples), "ms", budget_ms, "one core, median of 5")


def freeze_and_decide(ranks: int) -> Result:
    """Measure from the end of a stream to the orders to save; the state machine gets each rank's answer."""
    samples = []
    for _ in range(5):
        machine = _formed(ranks)
        begin = time.perf_counter_ns()
        machine.on_event(ce.StreamEnded(ce.ConnectionId(ranks)), 1.0)
        assert machine.incident is not None
        incident, orders = machine.incident.id, 0
        for rank in range(ranks - 1):
            answer = m.Frozen(Rank(rank), incident, Version(7), m.Phase.IDLE, final=True)
            actions = machine.on_event(ce.Received(ce.ConnectionId(rank + 1), answer), 1.0)
            orders += sum(isinstance(a, ce.Send) and isinstance(a.order, m.Save) for a in actions)
        samples.append((time.perf_counter_ns() - begin) / 1e6)
        assert orders >= 1
    how = "machine only: CPU of all events, median of 5"
    return Result(f"freeze + decide, {ranks} ranks", statistics.median(samples), "ms", 50.0, how)


def _formed(ranks: int) -> ControllerMachine:
    machine = ControllerMachine(ce.ControllerTimeouts(), lambda n: f"i{n}", 0.0)
    layout = Layout.data_parallel(ranks)
    parts = in_parts(layout)
    for rank in range(ranks):
        hello = toy.hello(rank, layout, host=f"host{rank // 8}", local_rank=rank % 8)
        for action in machine.on_event(ce.Received(ce.ConnectionId(rank + 1), hello), 0.0):
            if isinstance(action, ce.Send) and isinstance(action.order, TellLayout):
                for index, groups in enumerate(parts):
                    part = LayoutPart(Rank(rank), layout.digest, index, len(parts), groups)
                    machine.on_event(ce.Received(ce.ConnectionId(rank + 1), part), 0.0)
    return machine
