"""Breaks the core on purpose, many ways, and looks which tests notice.

``python -m tests.core.mutants`` prints a table; ``python -m tests.core.mutants NAME SUITE`` runs one suite on one of
them. A mutant that no suite catches is a hole in the tests.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

DECIDE, INCIDENT, SAVING = "ttp.core.decide", "ttp.core.incident", "ttp.core.saving"
RESCUE, MEMBERS, CONTROLLER = "ttp.core.rescue", "ttp.core.membership", "ttp.core.controller_machine"
PROCESSOR, GATE = "ttp.core.processor_machine", "ttp.processor.gate"

MUTANTS: dict[str, tuple[str, str, str]] = {
    "the oldest common version": (DECIDE, "version = max(common)", "version = min(common)"),
    "a torn copy is good enough": (DECIDE, "{v: How.UNDO} if answer.has_preimage else {}", "{v: How.AS_IS}"),
    "one shard is enough": (DECIDE, "common & versions", "common | versions"),
    "old incarnations count": (DECIDE, " if a.incarnation == newest}", "}"),
    "written pieces are written again": (DECIDE, " if written.get(s) != version}", "}"),
    "stuck ranks save": (DECIDE, "                answer.stuck,\n", ""),
    "the first answer decides": (INCIDENT, "if len(self._ranks_at) < 2:", "if len(self._ranks_at) < 1:"),
    "failed ranks are asked again": (
        INCIDENT,
        " and rank not in self.failures\n\n    def newest",
        "\n\n    def newest",
    ),
    "generations start over": (SAVING, "(self._job.term - 1) * GENERATIONS_PER_TERM", "0"),
    "a replan keeps its generation": (SAVING, "incident.generation + 1, ", "incident.generation, "),
    "lost savers are waited for": (SAVING, "            incident.dropped.append(rank)\n", ""),
    "one piece may be missing": (SAVING, "elif not incident.pending:", "elif len(incident.pending) < 2:"),
    "the committer is never replaced": (SAVING, "if not incident.able(incident.committer):", "if False:"),
    "any stale piece is taken": (
        SAVING,
        "if task is None or (report.incident, report.generation) != (incident.id, task.generation):\n"
        "            return\n        task.pieces",
        "if task is None:\n            return\n        task.pieces",
    ),
    "lost ranks keep their answer": (RESCUE, "            self.incident.forget(rank)\n", ""),
    "a flap is a fault": (RESCUE, "self._retract(incident, hello.rank, m.FaultKind.LOST)", "pass"),
    "thaw while in doubt": (RESCUE, "if self._job.suspects:\n            return", "if False:\n            return"),
    "thaw whatever is broken": (
        RESCUE,
        "not (incident.faulty or self._job.broken):\n            self._thaw",
        "True:\n            self._thaw",
    ),
    "plan before all came back": (RESCUE, "if job.gather_until is not None:", "if False:"),
    "give up before the grace is over": (RESCUE, "elif not job.suspects:", "else:"),
    "a late newer version is ignored": (RESCUE, "if self._improves(incident, answer):", "if False:"),
    "an open gate is trusted": (
        RESCUE,
        "if hello.incident != incident.id:\n            self",
        "if False:\n            self",
    ),
    "nobody tells who missed the end": (RESCUE, "if hello.incident or self._job.ended:", "if False:"),
    "TTP_OT is never over": (RESCUE, "now >= incident.opened_at + p.rescue_s:", "False:"),
    "silence is waited for": (RESCUE, "if now < due:", "if True:"),
    "a false alarm can end a job": (RESCUE, "if incident.snapshot or not (", "if incident.snapshot and not ("),
    "the fenced are let in": (MEMBERS, "if taken.fenced:", "if False:"),
    "a takeover keeps the term": (MEMBERS, "if hello.term_seen > self.term or", "if False and"),
    "two may claim a rank": (
        MEMBERS,
        "if taken.hello.nonce != hello.nonce:\n            if not",
        "if False:\n            if not",
    ),
    "the dead are not missed": (CONTROLLER, "            if rank not in self.job.members:", "            if False:"),
    "forming jobs have incidents": (CONTROLLER, "elif not self.job.formed:", "elif False:"),
    "old terms are obeyed": (PROCESSOR, "if order.term < self.term or not", "if not"),
    "left-over orders are obeyed": (
        PROCESSOR,
        "order.term < self.term or not self._welcomed:",
        "order.term < self.term:",
    ),
    "any version is saved": (PROCESSOR, "order.version != self._version or self._phase in", "self._phase in"),
    "an update in progress is final": (PROCESSOR, "final=quiet.phase is not m.Phase.UPDATING", "final=True"),
    "a snapshot outlives its controller": (PROCESSOR, "if self.incident and self._snapshot:", "if False:"),
    "an older save counts": (
        PROCESSOR,
        "(event.incident, event.generation) != (order.incident, order.generation)",
        "False",
    ),
    "a lonely rank spins": (
        PROCESSOR,
        "self._down_since is not None and not self.incident and",
        "self._down_since is not None and",
    ),
    "the gate lets everybody through": (GATE, "if not self._closed or self._updating:", "if True:"),
    "the gate forgets who waits": (GATE, "            self._opened.set()\n", ""),
}

SUITES: dict[str, list[str]] = {
    "tables": ["test_decide.py", "test_controller_machine.py", "test_processor_machine.py", "test_model_counts.py"],
    "model": ["test_model_check.py"],
    "simulation": ["test_simulation.py"],
}


def mutate(name: str) -> None:
    """Import the broken module in place of the real one; before anything else of ttp is imported."""
    module_name, old, new = MUTANTS[name]
    spec = importlib.util.find_spec(module_name)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    if source.count(old) != 1:
        sys.exit(3)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    exec(compile(source.replace(old, new), spec.origin, "exec"), module.__dict__)
    parent, _, child = module_name.rpartition(".")
    setattr(sys.modules[parent], child, module)


def caught(name: str, suite: str, timeout_s: float = 300.0) -> bool:
    """Whether a suite fails on a mutant. A suite that hangs has noticed too."""
    command = [sys.executable, "-m", "tests.core.mutants", name, suite]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return True
    assert done.returncode in (0, 1), done.stdout.decode() + done.stderr.decode()
    return done.returncode == 1


def main(arguments: list[str]) -> int:
    if arguments:
        import pytest

        name, suite = arguments
        mutate(name)
        files = [str(HERE / file) for file in SUITES[suite]]
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]))
    holes = 0
    sys.stdout.write(f"{'mutant':38} {'  '.join(SUITES)}\n")
    for name in MUTANTS:
        marks = {suite: "x" if caught(name, suite) else "-" for suite in SUITES}
        holes += "x" not in marks.values()
        sys.stdout.write(f"{name:38} {'  '.join(mark.ljust(len(suite)) for suite, mark in marks.items())}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(MUTANTS)} mutants, {holes} not caught\n")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
