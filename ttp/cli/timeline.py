"""Describes the lines of an incident in words."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from ttp.cli.incident_reader import IncidentLog, Line
from ttp.cli.output import count_text
from ttp.core.controller.evidence import OUTSIDER
from ttp.core.layout import compact_ranks, ranks_text
from ttp.core.messages import FaultKind
from ttp.store.room import size_text

Facts = Mapping[str, Any]

TEXT_MAX = 240
"""Maximum number of characters of an error that are shown."""
ALIKE_MAX = 16
"""Maximum number of lines of one kind about a single rank that are shown one by one; the ranks of others are listed."""

_OF_AN_ATTEMPT = frozenset({"plan", "saved", "save_failed", "commit", "commit_failed", "replan", "retry"})
"""The kinds of lines of an attempt to save that the storage refuses."""

_STYLES = {
    "evidence": "yellow",
    "committed": "bold green",
    "durable": "bold green",
    "held": "green",
    "not_held": "yellow",
    "awaited": "yellow",
    "saved": "green",
    "save_failed": "red",
    "commit_failed": "red",
    "outvoted": "yellow",
    "replan": "yellow",
    "fallback": "yellow",
    "retry": "yellow",
    "ailing": "yellow",
    "not_cured": "red",
    "mended": "green",
}


def style_of(kind: str) -> str:
    """Return the colour of a kind of event."""
    return _STYLES.get(kind, "")


def rows(log: IncidentLog) -> Iterator[tuple[Line, str]]:
    """Yield the rows to show: a line and its text. Equal answers of several ranks become one row, timed at the last.

    If the storage refuses again and again, the first two attempts and the last are shown, and the others counted. Of
    many lines of one kind, each about another rank, the first ``ALIKE_MAX`` are shown; the others become one row.
    """
    retries = [place for place, line in enumerate(log.lines) if line.kind == "retry"]
    counted = range(retries[1] + 1, retries[-2] + 1) if len(retries) > 4 else range(0)
    left_out = {place for place in counted if log.lines[place].kind in _OF_AN_ATTEMPT}
    totals = Counter(_alike(line) for place, line in enumerate(log.lines) if place not in left_out)
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    group: list[Line] = []
    for place, line in enumerate(log.lines):
        if group and _answer_text(line) != _answer_text(group[0]):
            yield _merged(group)
            group = []
        alike = _alike(line)
        if place in left_out:
            if place == counted[-1]:
                yield line, f"{len(retries) - 3} attempts more, which the storage refused too"
        elif _answer_text(line):
            group.append(line)
        elif not alike or len(ranks[alike]) < ALIKE_MAX:
            ranks[alike].append(line.facts.get("rank", -1))
            yield line, words(line)
        else:
            ranks[alike].append(line.facts["rank"])
            if len(ranks[alike]) == totals[alike]:
                others = ranks[alike][ALIKE_MAX:]  # a rank may report several times
                yield line, f"{len(others)} more like these: {_cut(ranks_text({*others}))}"
    if group:
        yield _merged(group)


def _alike(line: Line) -> str:
    """Return what the line tells of a single rank, in which lines about other ranks are alike; empty: it does not."""
    if line.kind == "stack" or not isinstance(line.facts.get("rank"), int):
        return ""
    return f"{line.kind} {line.facts.get('evidence', '')}"


def words(line: Line) -> str:
    """Return one event in words. An unknown kind is shown by its fields."""
    if _answer_text(line):
        return _merged([line])[1]
    tell = _WORDS.get(line.kind)
    if tell is not None:
        try:
            return tell.format_map(defaultdict(lambda: None, line.facts)) if isinstance(tell, str) else tell(line.facts)
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            pass  # the line is of a newer ttp, or damaged: show its fields as they are
    return json.dumps(dict(line.facts), ensure_ascii=False) if line.facts else ""


def _answer_text(line: Line) -> str:
    if line.kind not in ("answer", "acknowledged"):
        return ""
    f = line.facts
    if line.kind == "acknowledged":
        return f"in the update after version {f.get('version')}: its gate is closed, it finishes this update first"
    extras = [", main thread waits in a collective (its processor can save)"] if f.get("stuck") else []
    extras += [", scheduler not stepped yet"] if f.get("settled") is False else []
    return f"frozen at version {f.get('version')}, {f.get('phase')}{''.join(extras)}"


def _merged(group: list[Line]) -> tuple[Line, str]:
    ranks = {rank for line in group for rank in line.ranks}
    return group[-1], f"{ranks_text(ranks)} {_answer_text(group[0])}"


def _opened(f: Facts) -> str:
    if f.get("recovered"):
        return f"a new controller (term {f.get('term')}) took over the incident and asks every rank for its state again"
    what = "a checkpoint was requested" if f.get("snapshot") else "first sign of a fault"
    ranks = count_text(int(f.get("world_size") or 0), "rank")
    return f"{what}: all of {ranks} told to freeze (incarnation {f.get('incarnation')})"


def _evidence(f: Facts) -> str:
    witness, source = f.get("witness"), ""
    if isinstance(witness, int) and witness != f.get("rank"):
        outsider = "its launcher" if f.get("evidence") == FaultKind.EXITED.value else "an operator or a monitor"
        source = f" (told by {outsider if witness == OUTSIDER else f'rank {witness}'})"
    return f"{f.get('evidence')}: {_cut(str(f.get('text')))}{source}"


def _cut(text: str) -> str:
    """Shorten a long error, such as those of collectives; ``--json`` has all of it."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_MAX else f"{line[:TEXT_MAX]}…"


def _plan(f: Facts) -> str:
    savers, hows = f.get("savers"), f.get("how")
    shards = [f"rank {rank} writes {shard}" for shard, rank in savers.items()] if isinstance(savers, dict) else []
    if isinstance(savers, list):
        shards = [f"the handlers of {ranks_text(savers)} save"]
    first = [f"{how} {shard}" for shard, how in hows.items()] if isinstance(hows, dict) else []
    parts = [f"version {f.get('version')}: {_listed(shards)}", *([f"after {_listed(first)}"] if first else [])]
    return f"{', '.join(parts)}. {f.get('reason', '')}"


def _texts(value: object) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else []


def _listed(parts: list[str], shown_max: int = 8) -> str:
    rest = len(parts) - shown_max
    return ", ".join(parts[:shown_max]) + (f" and {rest} more" if rest > 0 else "")


def _saved(f: Facts) -> str:
    pieces = [p for p in f.get("pieces") or () if isinstance(p, dict)]
    size = size_text(sum(int(p.get("size") or 0) for p in pieces))
    return f"rank {f.get('rank')}: {_listed([str(p.get('file')) for p in pieces])} durable, {size}"


def _committed(f: Facts) -> str:
    name = PurePath(str(f.get("path", ""))).name
    return f"version {f.get('version')} exists: {name}, {size_text(int(f.get('size') or 0))}"


def _released(facts: Facts) -> str:
    if facts.get("again"):
        return f"the survivors go on in their processes: {facts.get('text')}"
    why = facts.get("why_not_again")
    kept = f"; no rank goes on in its process, because {why}" if why else ""
    return f"every rank exits with {facts.get('exit_code')}: {facts.get('text')}{kept}"


def _closed(f: Facts) -> str:
    left = f.get("left_behind")
    return f"{ranks_text(left)} did not leave in time" if isinstance(left, list) and left else "all have left"


def _restore(f: Facts) -> str:
    if f.get("error"):
        return f"no restore: {f.get('error')}"
    return (
        f"all ranks are to read {f['name']}" if f.get("name") else "there is no checkpoint: training begins with step 1"
    )


def _round(f: Facts) -> str:
    where = f"on {ranks_text(f.get('ranks') or ())}, version {f.get('version')}"
    return f"{f.get('round')} handlers {where}" + (f" ({f.get('purpose')})" if f.get("purpose") else "")


def _round_over(f: Facts) -> str:
    failed, lost = f.get("failed"), f.get("lost")
    parts = [f"done on {ranks_text(f.get('done') or ())}" if f.get("done") else "done nowhere"]
    if isinstance(failed, dict) and failed:
        parts.append(f"failed: {_listed([f'rank {rank}: {_cut(str(text))}' for rank, text in failed.items()])}")
    if lost:
        parts.append(f"lost: {ranks_text(lost)}")
    return f"{f.get('round')}: {'; '.join(parts)}"


def _told_manager(f: Facts) -> str:
    strategy = f", strategy {f.get('strategy')}" if f.get("strategy") else ""
    return f"{f.get('what')}{strategy}: {f.get('code')} {_cut(str(f.get('text') or ''))}".rstrip()


_WORDS: dict[str, str | Callable[[Facts], str]] = {
    "opened": _opened,
    "evidence": _evidence,
    "retracted": "evidence withdrawn ({evidence}): rank {rank} is back",
    "heard_again": "host {host} answers again (ranks {ranks})",
    "wrong": "wrong: {text}",
    "restore": _restore,
    "restored": lambda f: f"all ranks have read version {f.get('version')}, {size_text(int(f.get('size') or 0))}",
    "plan": _plan,
    "misfit": lambda f: (
        f"the replicas of {_listed(_texts(f.get('shards')))} split it into different parts: one rank writes it whole"
    ),
    "outvoted": lambda f: (
        f"what {ranks_text(f.get('ranks') or ())} wrote of {_listed(_texts(f.get('shards')))} differs from most other "
        "copies, which were reported later: a new plan is made"
    ),
    "replan": lambda f: f"savers {compact_ranks(f.get('lost_savers') or ())} were lost or failed: a new plan is made",
    "nothing_new": lambda f: str(f.get("text", "")),
    "waits": "no plan yet: {reason}",
    "saved": _saved,
    "save_failed": "rank {rank}: {text}",
    "commit": "rank {rank} writes the manifest and renames the draft",
    "committed": _committed,
    "commit_failed": "rank {rank}: {text}",
    "held": "version {version} is held in the memory of the host, and not durable yet",
    "not_held": "it cannot be held in memory: everything once more, into save_dir",
    "awaited": "one rank waits until version {version}, which is held in memory, is durable",
    "durable": lambda f: f"saved in the shadow: {_committed(f)}",
    "thawed": "all gates open, training goes on: {reason}",
    "released": _released,
    "closed": _closed,
    "formed": "the job of {world_size} ranks has formed",
    "joined": "rank {rank} joined (pid {pid} on {host})",
    "gone": "rank {rank} left before all ranks had joined (pid {pid} on {host})",
    "reconnected": "rank {rank} came back at version {version}",
    "refused": "rank {rank} (pid {pid} on {host}): {text}",
    "done": "rank {rank} has returned from train() at version {version}",
    "witness_asked": "rank {rank} is asked whether it still reaches {host}",
    "witness": lambda f: (
        f"rank {f.get('rank')} {'still reaches' if f.get('reachable') else 'cannot reach'} {f.get('host')}"
        f" ({_cut(str(f.get('text')))})"
    ),
    "stack": "stacks of rank {rank}:\n{text}",
    "fallback": "no rank can write to save_dir: all ranks write again, to {directory}",
    "retry": lambda f: (
        f"the storage refused the write ({_cut(str(f.get('reason')))}): next attempt in {f.get('after_s')} s"
    ),
    "standby": "a standby controller runs on {host} ({address})",
    "one_name": "{text}",
    "no_standby": "{host} could not start a standby controller",
    "abdicated": "another controller leads this job: this one gives it up and forgets its state",
    "buddies": "every rank stores second copies in the memory of another host",
    "no_buddies": "second copies are off: {text}",
    "copied": "every rank has stored a second copy of version {version}",
    "not_copied": "no second copy of version {version} on rank {rank}: {text}",
    "drained": lambda f: f"hosts that must start no ranks again: {', '.join(f.get('hosts') or ()) or 'none'}",
    "stood_still": "no rank has moved for {stood_s} s",
    "interrupted": "rank {rank} was interrupted (Ctrl-C) at version {version}",
    "left": "rank {rank} left on purpose at version {version}",
    "ailing": lambda f: f"rank {f.get('rank')} reports {f.get('ailment')}: {_cut(str(f.get('text')))}",
    "round": _round,
    "round_over": _round_over,
    "mended": "{outcome}, version {version}: {text}",
    "not_cured": "the ranks cannot go on: {text}",
    "not_recovered": "lost ranks were not replaced: {text}",
    "seats_open": lambda f: f"new processes may take the places of {ranks_text(f.get('ranks') or ())}",
    "offered": "host {host} stands by: it can start ranks of a host that is drained",
    "moves": lambda f: f"{ranks_text(f.get('ranks') or ())} are to move to other hosts",
    "guest": "a new process for rank {rank} waits on {host} (pid {pid})",
    "moves_not": "no rank is moved: {text}",
    "not_moved": "ranks could not be moved: {text}",
    "not_curable": lambda f: f"no repair in the running processes: {_listed(_texts(f.get('evidence')))}",
    "manager_came": "a manager decides what is done about faults",
    "manager_left": "the manager is gone: this controller decides",
    "told_manager": _told_manager,
}
"""How each kind of line is put in words: a text with the names of facts, or a function of the facts.

``ttp.core.controller.machine`` records the kinds.
"""
