"""Breaks the core on purpose, many ways, and looks which tests notice.

``python -m tests.core.mutants`` prints a table (``--quick``: until the first suite notices); ``python -m
tests.core.mutants NAME SUITE`` runs one suite on one of them. A mutant that no suite catches is a hole in the tests.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

DECIDE, INCIDENT, SAVING = "ttp.core.decide", "ttp.core.controller.incident", "ttp.core.controller.saving"
RESCUE, MEMBERS, CONTROLLER = (
    "ttp.core.controller.rescue",
    "ttp.core.controller.membership",
    "ttp.core.controller.machine",
)
FREEZING, PLANNING, RETRIES = (
    "ttp.core.controller.freezing",
    "ttp.core.controller.planning",
    "ttp.core.controller.retries",
)
ADMISSION, REPORTS, COLLECTORS = (
    "ttp.core.controller.admission",
    "ttp.core.controller.fault_reports",
    "ttp.core.controller.page_collectors",
)
LAYOUTS, GATHERING = "ttp.core.controller.layout_exchange", "ttp.core.controller.gathering"
PROCESSOR, GATE, ROUTE = "ttp.core.rank.machine", "ttp.processor.gate.gate", "ttp.core.rank.failover"
RANK_RESCUE, COPY_TURNS = "ttp.core.rank.rescue", "ttp.core.rank.copy_turns"
RESTORING, LOOKING = "ttp.core.controller.restore_agreement", "ttp.processor.state_inspector"
BUDDIES = "ttp.core.replication"
STRIPES, SPREAD = "ttp.core.stripes", "ttp.core.placement"
SILENCE = "ttp.core.controller.silence"
JURY, HANGS, WITNESSES, MIRRORS = (
    "ttp.core.replica_vote",
    "ttp.core.controller.hangs",
    "ttp.core.controller.indirect_probe",
    "ttp.core.controller.mirrors",
)

MUTANTS: dict[str, tuple[str, str, str]] = {
    "the oldest common version": (DECIDE, "_plan(max(common), everybody", "_plan(min(common), everybody"),
    "a torn copy is good enough": (DECIDE, "{v: How.UNDO} if answer.has_preimage else {}", "{v: How.AS_IS}"),
    "one shard is enough": (DECIDE, "common & versions", "common | versions"),
    "old incarnations count": (DECIDE, " if a.incarnation == newest}", "}"),
    "written pieces are written again": (DECIDE, " if written.get(s) != version}", "}"),
    "stuck ranks save": (DECIDE, "                answer.main_thread_blocked,\n", ""),
    "the first answer decides": (INCIDENT, "if len(self._ranks_at) < 2:", "if len(self._ranks_at) < 1:"),
    "an old answer takes back a newer one": (
        FREEZING,
        "(not answer.final or incident.is_stale(answer))",
        "not answer.final",
    ),
    "who stands by for ever waits for a rank for ever": (
        GATHERING,
        "patient = now < self._since + self._patience.forming_s",
        "patient = now < self._since + self._patience.abandoned_s",
    ),
    "nobody may go back": (INCIDENT, " and not known.has_preimage\n", "\n"),
    "a torn rank is not believed": (INCIDENT, " and answer.phase is not m.Phase.TORN and not known", " and not known"),
    "failed ranks are asked again": (
        INCIDENT,
        " and rank not in self.failures\n\n    def newest",
        "\n\n    def newest",
    ),
    "generations start over": (SAVING, "(self._job.term - 1) * GENERATIONS_PER_TERM", "0"),
    "a replan keeps its generation": (SAVING, "incident.generation + 1, ", "incident.generation, "),
    "lost savers are waited for": (SAVING, "            incident.dropped.append(rank)\n", ""),
    "one piece may be missing": (SAVING, "elif not (incident.pending or", "elif not (len(incident.pending) > 1 or"),
    "the committer is never replaced": (SAVING, "if not incident.can_commit(incident.committer):", "if False:"),
    "any stale piece is taken": (
        SAVING,
        "if task is None or (report.incident, report.generation) != (incident.id, task.generation):\n"
        "            return\n        task.pieces",
        "if task is None:\n            return\n        task.pieces",
    ),
    "lost ranks keep their answer": (RESCUE, "        incident.forget(rank)\n", ""),
    "a flap is a fault": (RESCUE, "incident.evidence.withdraw(hello.rank, m.FaultKind.LOST)", "pass"),
    "thaw while in doubt": (RESCUE, "if self._job.in_doubt or self._looks_again(incident, now):", "if False:"),
    "a silent host is waited for": (
        RESCUE,
        "        incident.waiting.discard(rank)\n        self.saving",
        "        self.saving",
    ),
    "what a silent host has said still counts": (
        RESCUE,
        "        self.saving.drop(incident, rank)\n\n    def heard",
        "\n    def heard",
    ),
    "who is heard again stays accused": (
        RESCUE,
        "            incident.evidence.withdraw(rank, m.FaultKind.SILENT)\n            self._freezing",
        "            self._freezing",
    ),
    "words are all that counts": (SILENCE, "event.silent_s >= self._patience.doubt_s and", "True and"),
    "a job that forms is doubted": (SILENCE, "return self._job.formed and not", "return not"),
    "what is not known is doubted": (SILENCE, "return  # it cannot be", "event = LookedAt(host, 9.0)  # it cannot be"),
    "a doubt never ends": (SILENCE, "            self._job.silent -= self._ranks", "            self._ranks"),
    "a controller that was away blames others": (SILENCE, "        if now > due + LATE_S:", "        if False:"),
    "one word ends no doubt": (SILENCE, "        if self._doubted.pop(host, None) is None:", "        if True:"),
    "the controller's own host is looked at": (SILENCE, "if host == self._host or", "if"),
    "thaw whatever is broken": (
        RESCUE,
        "not (incident.faulty or self._job.broken):\n            self._thaw",
        "True:\n            self._thaw",
    ),
    "plan before all came back": (PLANNING, "if self._job.gather_until is not None:", "if False:"),
    "give up before the grace is over": (
        PLANNING,
        'if self._job.in_doubt:\n            return "',
        'if False:\n            return "',
    ),
    "a late newer version is ignored": (RESCUE, "and self._planner.improves(incident, answer):", "and False:"),
    "an open gate is trusted": (
        RESCUE,
        "if hello.incident != incident.id:\n            self",
        "if False:\n            self",
    ),
    "nobody tells who missed the end": (RESCUE, "if hello.incident or self._job.ended:", "if False:"),
    "TTP_OT is never over": (RESCUE, "now >= incident.patient_since + p.rescue_s:", "False:"),
    "silence is waited for": (FREEZING, "if now < due:", "if True:"),
    "a false alarm can end a job": (
        RESCUE,
        "if incident.snapshot or not (incident.faulty",
        "if incident.snapshot and not (incident.faulty",
    ),
    "an update proves nothing": (CONTROLLER, "not version > known > self.base_version", "version >= 0"),
    "a restore is taken for an update": (
        CONTROLLER,
        "not version > known > self.base_version",
        "not version > self.base_version",
    ),
    "the fenced are let in": (MEMBERS, "if taken.fenced:", "if False:"),
    "a takeover keeps the term": (MEMBERS, "if hello.term_seen > self.term or", "if False and"),
    "two may claim a rank": (
        MEMBERS,
        "if taken.hello.nonce != hello.nonce:\n            if not",
        "if False:\n            if not",
    ),
    "the dead are not missed": (GATHERING, "if rank not in job.members:", "if False:"),
    "forming jobs have incidents": (REPORTS, "if not self._job.formed:", "if False:"),
    "old terms are obeyed": (PROCESSOR, "if order.term < self.term or not", "if not"),
    "left-over orders are obeyed": (
        PROCESSOR,
        "order.term < self.term or not self._outbox.welcomed:",
        "order.term < self.term:",
    ),
    "any version is saved": (RANK_RESCUE, "return order.version == state.version and not torn", "return not torn"),
    "an update in progress is final": (RANK_RESCUE, "final=quiet.phase is not m.Phase.UPDATING", "final=True"),
    "a snapshot outlives its controller": (RANK_RESCUE, "if self.incident and self._snapshot:", "if False:"),
    "an older save counts": (
        RANK_RESCUE,
        "(event.incident, event.generation) != (order.incident, order.generation)",
        "False",
    ),
    "a lonely rank spins": (
        PROCESSOR,
        "self._down_since is not None and not self.incident and",
        "self._down_since is not None and",
    ),
    "the gate lets everybody through": (GATE, "if not self._closed or self._admitted:", "if True:"),
    "the gate forgets who waits": (
        GATE,
        "self._closure += 1\n            self._opened.set()",
        "self._closure += 1",
    ),
    # replicas that differ
    "odd copies are as good": (DECIDE, "if verdict.odd or bad:", "if bad:"),
    "NaN is as good": (DECIDE, "        if bad:\n            yield", "        if False:\n            yield"),
    "a dispute is not said": (DECIDE, "tuple(sorted({*verdict.disputed, *distrusted}))", "()"),
    "who cannot write is asked": (DECIDE, "if not answer.can_save:\n        return {}", "if False:\n        return {}"),
    "the minority is right": (
        JURY,
        "for d, ranks in by_digest.items() if d != digest",
        "for d, ranks in by_digest.items() if d == digest",
    ),
    "a tie is a majority": (JURY, "if votes == second:", "if False:"),
    "different versions are compared": (JURY, "(shard, witness.version)", "(shard, 0)"),
    "the torn have a vote": (JURY, "if witness.torn:", "if False:"),
    # redo and undo
    "a gradient is good for two updates": (DECIDE, "Version(v + 1)] = How.REDO", "Version(v + 2)] = How.REDO"),
    "an update is unmade twice": (DECIDE, "Version(v - 1)] = How.UNDO", "Version(v - 2)] = How.UNDO"),
    "updates are made for nobody": (
        PLANNING,
        "plain.version >= self._newest_finished(incident)):",
        "plain.version > self._newest_finished(incident)):",
    ),
    "nothing is made or unmade": (PLANNING, "full = self._decided(incident, with_offers=True)", "full = plain"),
    "what the dead had finished is forgotten": (
        PLANNING,
        "max((*answered, *(mb.version for mb in self._job.members.values())), default",
        "max(answered, default",
    ),
    "who is in the barrier is left behind": (PLANNING, "if not self._grows(incident, verdict, now):", "if True:"),
    "nobody is waited for at the gate": (PLANNING, 'if self._hopes(incident, now) else ""', 'if False else ""'),
    "what must be made is saved as it is": (SAVING, "how=hows.get(rank, How.AS_IS),", "how=How.AS_IS,"),
    "an update is saved before it is made": (
        RANK_RESCUE,
        "if quiet.version == order.version and quiet.phase is m.Phase.IDLE:",
        "if True:",
    ),
    "an update that hangs is waited for": (
        RANK_RESCUE,
        "if self._redo_until is not None and now >= self._redo_until:",
        "if False:",
    ),
    "unmade without a pre-image": (
        RANK_RESCUE,
        "if order.order.how is How.UNDO and self._preimage:\n            return",
        "if order.order.how is How.UNDO:\n            return",
    ),
    "unmade without saying so": (
        RANK_RESCUE,
        "StartSave(_as_it_is(order) if order.order.how is How.REDO else order)",
        "StartSave(_as_it_is(order))",
    ),
    "a snapshot can be made by an update": (
        RANK_RESCUE,
        "has_gradient=quiet.has_gradient and not self._may_not_redo",
        "has_gradient=quiet.has_gradient",
    ),
    "the gate stays open after an update": (
        GATE,
        "self._updating, self._admitted, self._left, self._between = True, False, False, False",
        "self._updating, self._left, self._between = True, False, False",
    ),
    # hangs
    "hangs are not looked for": (
        REPORTS,
        "suspicion = self._parts.hangs.check(now, self._job.live)",
        "suspicion = None",
    ),
    "a slow rank is a hanging one": (RESCUE, "or self._looks_again(incident, now):", ":"),
    "whoever comes to the gate hangs": (
        FREEZING,
        "if not answer.main_thread_blocked:\n            incident",
        "if False:\n            incident",
    ),
    "evaluation is a hang": (HANGS, "not speaking or not speaking.isdisjoint(self._pausing)", "not speaking"),
    "the silent are not suspected": (HANGS, "rank for rank in ranks if self._silent(rank, now)))", "()))"),
    "the first is taken for the last": (HANGS, "last = min(self._seen", "last = max(self._seen"),
    "the first steps teach": (HANGS, "self._first + UNSETTLED_VERSIONS", "self._first"),
    "a hang is never told": (HANGS, "return self._suspicion(", "return None and self._suspicion("),
    # fencing, witnesses, pages of other hosts
    "who was seen to die may come back": (REPORTS, "        self._job.fence(rank, text)\n", ""),
    "every host is a neighbour": (REPORTS, "witness.hello.host != subject.hello.host", "False"),
    "a witness is not believed": (WITNESSES, "if not answer.reachable:", "if True:"),
    # kept copies
    "a copy is whole when one rank has it": (BUDDIES, "len(stored) == len(self._job.members)", "stored"),
    "an open copy is begun again": (
        BUDDIES,
        "if self.pending is not None:\n            return False",
        "if False:\n            return False",
    ),
    "the older copy goes in any case": (
        BUDDIES,
        "gone = self.whole if whole else version",
        "gone = self.whole",
    ),
    "who has gone on knows nothing": (BUDDIES, "if v < report.version and v not in self._fates]:", "if False]:"),
    "a skipped turn is not said": (COPY_TURNS, "if self._skipped > order.version:", "if False:"),
    "copies are nobody's last resort": (
        DECIDE,
        "_common_versions(everybody, ways, written, kept)",
        "_common_versions(everybody, ways, written)",
    ),
    "copies replace what is there": (
        DECIDE,
        "for shard, able in candidates.items() if not able}",
        "for shard, able in candidates.items() if kept}",
    ),
    "steps are given up at once": (
        PLANNING,
        "if isinstance(verdict, Plan) and not verdict.lost:",
        "if isinstance(verdict, Plan):",
    ),
    "pages of lost hosts are not brought": (
        COLLECTORS,
        "incident.able(buddy) else copies.get(rank)",
        "incident.able(buddy) else None",
    ),
    "a keeper that comes back elsewhere is not found": (
        MIRRORS,
        "*(r for r, keeper in self._keepers.items() if keeper == rank)",
        "",
    ),
    "pages that are kept elsewhere are forgotten": (COLLECTORS, "elif missing:", "elif False:"),
    "the living are inherited from": (MIRRORS, "page.rank in job.live or", "False or"),
    "pages of another launch are inherited": (MIRRORS, "or page.incarnation != job.incarnation", ""),
    # standby controllers
    "a flap is the death of a controller": (ROUTE, "for_s < self._failover_s and", "False and"),
    "nobody is asked to take over": (ROUTE, "        self.takeover = True\n", ""),
    "the lost controller is asked again": (ROUTE, "ring[(at + 1 + self._walked)", "ring[(at + self._walked)"),
    "whoever is sent on has nowhere to go": (PROCESSOR, "if code is m.RefusalCode.MOVED:", "if False:"),
    "a new controller takes everybody": (ADMISSION, "hello.standbys and not hello.takeover:", "False:"),
    "two controllers lead": (ADMISSION, "hello.takeover and hello.term_seen > self._job.term and", "False and"),
    # ranks that come back
    "gathering ends while ranks still come": (GATHERING, "elif new and job.gather_until is not None:", "elif False:"),
    "a controller that was late blames the others": (GATHERING, "if now >= due + self._late_s:", "if False:"),
    # layouts
    "a rank that was asked for its layout and died is waited for": (
        LAYOUTS,
        "        elif latest:\n            self._ask(digest, now)",
        "",
    ),
    "a layout is believed whatever its digest": (LAYOUTS, "elif layout.digest != part.digest:", "elif False:"),
    "two controllers share a draft": (
        RESCUE,
        'incident.reign = f"-{fresh_id}" if recovered_id else ""',
        'incident.reign = ""',
    ),
    # jobs that form
    "what a lost process found counts for its successor": (
        REPORTS,
        "            self._parts.forget(rank)\n        else",
        "            pass\n        else",
    ),
    "what a replaced process found counts for its successor": (
        ADMISSION,
        "            self._parts.forget(hello.rank)\n        self._rescue",
        "        self._rescue",
    ),
    "a launch that came to nothing goes on": (
        MEMBERS,
        "(another or hello.launch > self.gone.get(hello.rank, hello.launch))",
        "another",
    ),
    "a job that is forming is of the past": (
        MEMBERS,
        "if not self.formed:\n            return False  #",
        "if False:\n            return False  #",
    ),
    "half of a job that never trained stays alone": (
        GATHERING,
        "job.layout.world_size + self._untrained",
        "job.layout.world_size",
    ),
    "the others are looked for once": (
        GATHERING,
        "now + self._patience.gather_s, False\n            return",
        "now + self._patience.gather_s, True\n            return",
    ),
    "the others are looked for ever": (GATHERING, "self._since if self._sent_on else now", "now"),
    "who was sent on once never is again": (GATHERING, "self._sent_on &= now <", "self._sent_on &= True or now <"),
    "who has sent all on is not needed": (
        ADMISSION,
        "        self._end.heard(now)\n        self._parts",
        "        self._parts",
    ),
    # who answers what, and who commits
    "who hangs in an update cannot commit": (
        INCIDENT,
        "return rank in self.answers and rank not in self.failures",
        "return self.able(rank)",
    ),
    "who hangs commits first": (
        SAVING,
        "(r not in writers, not incident.answered(r), r)",
        "(r not in writers, incident.answered(r), r)",
    ),
    "who is admitted stands still": (GATE, "or self._between or self._admitted:", "or self._between:"),
    "closures of the gate are alike": (GATE, "            self._closure += 1\n", ""),
    "who comes to the gate is answered for before": (
        LOOKING,
        "            self._came.wait(COMES_S)\n",
        "            pass\n",
    ),
    "an old look is as good": (
        LOOKING,
        "        if not self._moved_on(state):\n            self._said",
        "        if True:\n            self._said",
    ),
    "what has changed is not said": (
        LOOKING,
        "            self._say(now)\n        return now",
        "            pass\n        return now",
    ),
    # parts
    "a part is enough": (
        STRIPES,
        "elif parse(name).index == 1 and not missing(parse(name), written):",
        "elif parse(name).index == 1:",
    ),
    "what is cut is cut anew": (SPREAD, "lacking=lacking if written == version else ()", "lacking=()"),
    "parts of another version count": (SPREAD, "if written == version else", "if written else"),
    "whoever differs writes a part too": (
        SPREAD,
        "other.rank != lead.rank and _alike(shard, lead, other)",
        "other.rank != lead.rank",
    ),
    "a dispute is cut": (DECIDE, "frozenset({*uncut, *verdict.odd, *verdict.disputed})", "frozenset(uncut)"),
    "small shards are cut": (SPREAD, ", size // stripes.PART_BYTES_MIN)", ")"),
    "several of one host before other hosts": (
        SPREAD,
        "(a is not first, a.busy, place, work",
        "(a is not first, a.busy, 0, work",
    ),
    "whoever writes is asked again": (PLANNING, "busy=frozen.rank in incident.pending,", "busy=False,"),
    "parts are mixed": (SAVING, "incident.cuts.setdefault(part.shard, cut) != cut}", "False}"),
    "parts that do not fit are kept": (SAVING, "        incident.forget_parts(dict.fromkeys(odd, 1))\n", ""),
    "a shard that does not fit is cut again": (SAVING, "        incident.uncut |= odd\n", ""),
    "forgotten parts come back": (SAVING, "        task.keep_ordered()\n", ""),
    # storage
    "there is no second directory": (
        RETRIES,
        "if not (fallback and incident.failures) or incident.directory:",
        "if True:",
    ),
    "the second directory is tried for ever": (
        RETRIES,
        "if not (fallback and incident.failures) or incident.directory:",
        "if not (fallback and incident.failures):",
    ),
    "a full disk is given up at once": (
        RETRIES,
        "if incident.snapshot or not (incident.passing and broken):",
        "if True:",
    ),
    "a healthy job waits for a full disk": (
        RETRIES,
        "if incident.snapshot or not (incident.passing and broken):",
        "if not incident.passing:",
    ),
    "what will fail again is tried again": (RETRIES, 'forgive("", incident.passing)', 'forgive("", incident.failures)'),
    "a full disk is asked without a pause": (
        RETRIES,
        "incident.look_again_at = now + pause_s",
        "incident.look_again_at = 0.0",
    ),
    "a full disk is asked at the same pace for ever": (RETRIES, "RETRY_S * 2**incident.retries", "RETRY_S"),
    "what is durable is written again": (INCIDENT, "if task.pieces is not None]", "if False]"),
    "what is durable elsewhere counts here": (
        INCIDENT,
        "self._written_in.get(directory, (None, [], {}))",
        "self._written_in[self.directory]",
    ),
    "a hanging disk is waited for": (
        SAVING,
        "if rank is None or now < since + patience_s:",
        "if True:",
    ),
    "a slow disk is a hanging one": (SAVING, "if known is not None and known[0] != size:", "if False:"),
    "a hanging disk is tried by everybody": (
        RESCUE,
        "if self.saving.stalled(incident, p.stall_s, now):",
        "if self.saving.stalled(incident, p.stall_s, now) and False:",
    ),
    "what was committed may vanish": (RESTORING, "if self._committed is not None and not error and", "if False and"),
    "damage is a mystery": (RESTORING, "any(seen) or any(damaged)", "any(seen)"),
    "one rank has not seen enough": (RESTORING, "any(seen) or any(damaged)", "any(damaged)"),
    "an incarnation without a commit forgets": (RESTORING, "(committed or self._committed) if", "committed if"),
    "every job is the same": (ADMISSION, "last_commit, same_job=same_job", "last_commit, same_job=True"),
}

SUITES: dict[str, list[str]] = {
    "tables": [
        "test_decide.py",
        "test_silence.py",
        "test_jury.py",
        "test_stripes.py",
        "test_buddies.py",
        "test_route.py",
        "test_admission.py",
        "test_controller_machine.py",
        "test_controller_wide.py",
        "test_false_alarms.py",
        "test_job_end.py",
        "test_mirrors.py",
        "test_other_directory.py",
        "test_restoring.py",
        "test_standbys.py",
        "test_takeover.py",
        "test_witnesses.py",
        "test_processor_machine.py",
        "test_rank_rescue.py",
        "test_hang_lives.py",
        "test_hangs.py",
        "test_model_counts.py",
        "../processor/test_gate.py",
        "../processor/test_freeze_answers.py",
    ],
    "model": ["test_model_check.py"],
    "simulation": ["test_simulated_faults.py", "test_simulation.py"],
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
    """One suite on one mutant; or a table of all; with ``--quick`` the first suite that notices is enough."""
    if arguments and arguments[0] != "--quick":
        import pytest

        name, suite = arguments
        mutate(name)
        files = [str(HERE / file) for file in SUITES[suite]]
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]))
    holes = 0
    sys.stdout.write(f"{'mutant':44} {'  '.join(SUITES)}\n")
    for name in MUTANTS:
        marks: dict[str, str] = {}
        for suite in SUITES:
            enough = bool(arguments) and "x" in marks.values()
            marks[suite] = " " if enough else "x" if caught(name, suite) else "-"
        holes += "x" not in marks.values()
        sys.stdout.write(f"{name:44} {'  '.join(mark.ljust(len(suite)) for suite, mark in marks.items())}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(MUTANTS)} mutants, {holes} not caught\n")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
