"""Judge one run: from the evidence, compute its outcome and findings. The functions are pure.

Outcomes: ``saved`` (restarted from a new checkpoint, no finished step lost), ``kept`` (restarted from the checkpoint on
disk; no newer step existed), ``gone`` (restarted from the checkpoint on disk, because no rank with a newer step was
left), ``unhurt`` (never restarted), ``refused`` (steps were lost, and ttp reported why it could not save), ``lost``
(steps were lost, and ttp did not report it), ``stuck`` (the run did not come to its end).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ttp.chaos.notes import LifeKey, RankLife
from ttp.chaos.record import Evidence, Found, Record
from ttp.chaos.vocabulary import parse_target
from ttp.chaos.ways import way_findings
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED

COVERED = ("saved", "kept")
_DISK = ("disk-full", "disk-ro")
_DEADLY = ("kill", "segv", "exit", "raise", "term", "report", "partition", "unplug")
"""Faults that end a launch. Times are measured from the first of these in a run, if there is one."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of a run.

    Args:
        outcome: see the module.
        findings: everything that was wrong, in words; empty if the run is good.
        version: version from which the job resumed; None if it was not restarted.
        lost_steps: number of steps that readable ranks had finished and that the checkpoint lacks.
        detect_ms: milliseconds from the first fault to the opened incident; None if there was none.
        commit_ms: milliseconds from the first fault to the first commit of the newest saved version; None if there
            was no commit.
        back_ms: milliseconds from the first fault until the job trained again; None if it did not.
    """

    outcome: str
    findings: tuple[str, ...]
    version: int | None
    lost_steps: int
    detect_ms: float | None
    commit_ms: float | None
    back_ms: float | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of versions from which a restart may resume.

    Args:
        lower: the newest version that a readable rank had finished.
        upper: the newest version that any rank had begun.
    """

    lower: int
    upper: int


def judge(evidence: Evidence) -> Judgement:
    """Judge one run by its versions, checkpoints, bits and exit codes."""
    record = evidence.record
    if record.trouble:
        return Judgement("stuck", (record.trouble,), None, 0, None, None, None)
    lives = trained(evidence)
    lost, findings = 0, [*_disk_findings(evidence), *_request_findings(evidence)]
    version = None
    for before, after in itertools.pairwise(lives):
        version, missing, wrong = _resumed(evidence, before, after)
        lost += missing
        findings += wrong
    findings += bit_findings(evidence, lives)
    outcome = _outcome(evidence, lives, version, lost)
    findings += [*_exit_findings(evidence, outcome), *_expectation(evidence, outcome, lost), *way_findings(evidence)]
    times = _times(record)
    return Judgement(outcome, tuple(findings), version, lost, *times)


def diverges(evidence: Evidence) -> bool:
    """Return whether rank-local state was lost for good, so that the bits of later steps cannot be compared."""
    later = () if evidence.record.trouble else trained(evidence)[1:]
    return evidence.diverged or any(_lacking(evidence, life) for life in later)


def trained(evidence: Evidence) -> list[LifeKey]:
    """Return, in order, the lives of the run in which at least one rank was restored."""

    def began(life: LifeKey) -> bool:
        return any(life in lives and lives[life].start is not None for lives in evidence.notes.values())

    return [life for life in evidence.record.lives if began(life)]


# ------------------------------------------------------------------------------------------------------------ versions


def bounds(evidence: Evidence, life: LifeKey) -> Bounds:
    """Return the bounds after a life of a job with one replica group (Statement 1).

    Any readable rank can save. If the network was cut, the job may continue from either side of the cut.
    """
    gone, far = unreadable(evidence, life), _far_side(evidence, life)
    there = {r: lives[life] for r, lives in evidence.notes.items() if life in lives and lives[life].start is not None}
    base = max((rank_life.start or 0 for rank_life in there.values()), default=0)
    begun = [rank_life.begun for rank_life in there.values()]
    sides = [[there[r].finished for r in there if r not in gone and (r in far) is side] for side in (False, True)]
    finished = min((max(side) for side in sides if side), default=base)
    return Bounds(max(base, finished), max([base, *begun]))


def _far_side(evidence: Evidence, life: LifeKey) -> frozenset[int]:
    return frozenset(r for s in evidence.record.injections if s.life == life for r in s.cut_off)


def unreadable(evidence: Evidence, life: LifeKey) -> frozenset[int]:
    """Return the ranks whose state could no longer be read in this life."""
    return frozenset(r for s in evidence.record.injections if s.life == life for r in s.unreadable)


def _resumed(evidence: Evidence, before: LifeKey, after: LifeKey) -> tuple[int, int, list[str]]:
    """Return the version, the number of lost steps and the findings of one restart."""
    starts = {r: lives[after].start for r, lives in evidence.notes.items() if after in lives}
    known = {start for start in starts.values() if start is not None}
    if len(known) != 1:
        return 0, 0, [f"the ranks resumed from different versions: {starts}"]
    (version,) = known
    limits = bounds(evidence, before)
    findings = []
    if version > limits.upper:
        findings.append(f"resumed from version {version}, but no rank had begun a newer one than {limits.upper}")
    on_disk = {found.version for found in evidence.record.found if not found.problems}
    if version and version not in on_disk:
        findings.append(f"resumed from version {version}, but the whole checkpoints are {sorted(on_disk)}")
    return version, max(0, limits.lower - version), findings


def _disk_findings(evidence: Evidence) -> Iterator[str]:
    """Yield findings about the disk: checkpoints not whole or newer than any update, and failures without errno."""
    for found in evidence.record.found:
        for problem in found.problems:
            yield f"the checkpoint of version {found.version} is not whole: {problem}"
    most = max((bounds(evidence, life).upper for life in trained(evidence)), default=0)
    for seen in evidence.record.told("committed"):
        if int(seen.facts["version"]) > most:
            yield f"version {seen.facts['version']} was committed, but no rank had begun a newer one than {most}"
    failures = [*evidence.record.told("save_failed"), *evidence.record.told("commit_failed")]
    if evidence.record.injected(*_DISK, "disk-quota"):
        for seen in failures:
            if "errno" not in str(seen.facts.get("text", "")).lower():
                yield f"a save failed without its errno: {seen.facts.get('text', '')!r}"


def _request_findings(evidence: Evidence) -> Iterator[str]:
    """Yield a finding for each requested checkpoint that was not written."""
    for answer in evidence.record.answers:
        if answer["answer"] not in ("save", "again"):
            continue
        if not answer.get("saved"):
            if not _fatal(evidence.record):
                yield f"a requested checkpoint was not written: {answer.get('text')}"
        elif answer["version"] not in {found.version for found in evidence.record.found}:
            yield f"version {answer['version']} was reported as saved, but there is no such checkpoint"


def _fatal(record: Record) -> bool:
    return any(s.unreadable or s.cut_off or s.what in ("raise", "term", "report") for s in record.injections)


# ---------------------------------------------------------------------------------------------------------------- bits


def bit_findings(evidence: Evidence, lives: list[LifeKey]) -> list[str]:
    """Return findings where the state after a restart or a step has other bits than in the unbroken run."""
    if evidence.diverged:
        return []
    found: list[str] = []
    for index, life in enumerate(lives):
        lacking = _lacking(evidence, life) if index else frozenset()
        for rank, of_rank in sorted(evidence.notes.items()):
            if life in of_rank:
                found += _rank_bits(evidence, rank, of_rank[life], lacking)
    for before, after in itertools.pairwise(lives):
        found += _missing_pages(evidence, before, after)
    return found[:6]


def _restored(evidence: Evidence, life: LifeKey) -> list[Found]:
    """Return the checkpoints from which this life may have been restored."""
    starts = {lives[life].start for lives in evidence.notes.values() if life in lives}
    return [found for found in evidence.record.found if found.version in starts]


def _without_pages(evidence: Evidence, life: LifeKey) -> frozenset[int]:
    """Return the ranks whose own state is missing in the checkpoint from which this life was restored."""
    return frozenset(rank for found in _restored(evidence, life) for rank in found.missing_pages)


def _late_copies(evidence: Evidence, life: LifeKey) -> frozenset[int]:
    """Return the ranks whose own state in that checkpoint is a copy from before the last version that they finished.

    The copy on another host is sent beside the training: a host may be lost before the last one has arrived.
    """
    if not evidence.script.mirrored:
        return frozenset()
    earlier = {(rank, found.version) for found in _restored(evidence, life) for rank in found.earlier_pages}
    return frozenset(
        rank
        for rank, version in earlier
        if any((was.start or 0) < version <= was.finished for was in evidence.notes[rank].values())
    )


def _lacking(evidence: Evidence, life: LifeKey) -> frozenset[int]:
    return _without_pages(evidence, life) | _late_copies(evidence, life)


def _rank_bits(evidence: Evidence, rank: int, life: RankLife, lacking: frozenset[int]) -> Iterator[str]:
    known = evidence.reference[rank]
    if life.start is not None and life.start_digests is not None:
        shard, own = known[life.start]
        if life.start_digests[0] != shard:
            yield f"rank {rank}: weights or moments restored for version {life.start} differ from the unbroken run's"
        if rank not in lacking and life.start_digests[1] != own:
            yield f"rank {rank}: its own state restored for version {life.start} differs from the unbroken run's"
    wrong = [version for version, digests in life.states.items() if digests != known[version]]
    if wrong and not lacking:
        yield f"rank {rank}: from version {min(wrong)} on its bits differ from the unbroken run's"


def _missing_pages(evidence: Evidence, before: LifeKey, after: LifeKey) -> Iterator[str]:
    """Yield a finding if a checkpoint lacks the rank-local state of a rank whose pages could be reached."""
    missing = _without_pages(evidence, after)
    started = {lives[before].start for lives in evidence.notes.values() if before in lives}
    new = started != {lives[after].start for lives in evidence.notes.values() if after in lives}
    if new and not missing <= (allowed := alone(evidence, before)):
        yield f"rank-local state of ranks {sorted(missing)} was not saved; only that of {sorted(allowed)} may be lost"


def alone(evidence: Evidence, life: LifeKey) -> frozenset[int]:
    """Return the ranks whose pages may be lost: no rank of their host was left, a cut, or a quota.

    The quota of a process also holds for shared memory, where its page grows in the first updates.
    """
    script, gone = evidence.script, unreadable(evidence, life)
    hosts = [host for host in range(script.hosts) if gone.issuperset(script.ranks_of(host))]
    poor = [parse_target(s.who) for s in evidence.record.injected("disk-quota") if s.life == life]
    full = frozenset(rank for target in poor if target is not None for rank in target.numbers)
    if script.mirrored and len(hosts) == 1:
        return full
    cut = frozenset(range(script.world_size)) if _far_side(evidence, life) else frozenset()
    return cut | full | frozenset(rank for host in hosts for rank in script.ranks_of(host))


# ------------------------------------------------------------------------------------------------------------- outcome


def _outcome(evidence: Evidence, lives: list[LifeKey], version: int | None, lost: int) -> str:
    if len(lives) < 2:
        return "unhurt"
    if lost:
        said = any(e.facts.get("exit_code") == EXIT_NOT_SAVED for e in evidence.record.told("released"))
        return "refused" if said else "lost"
    hurt = [of_rank[lives[0]] for of_rank in evidence.notes.values() if lives[0] in of_rank]
    start = min((life.start or 0 for life in hurt), default=0)
    if version and version > start:
        return "saved"
    return "gone" if max((life.finished for life in hurt), default=start) > start else "kept"


def _exit_findings(evidence: Evidence, outcome: str) -> Iterator[str]:
    """Yield a finding if no ``ttp run`` ended with the outcome's exit code, 75 or 70, which schedulers rely on."""
    wanted = {"saved": EXIT_SAVED, "refused": EXIT_NOT_SAVED}.get(outcome)
    exits = evidence.record.exits
    if wanted is not None and exits and evidence.script.launcher == "ttp" and wanted not in exits:
        yield f"the launchers ended with exit codes {exits}, and none of them is {wanted}"


def expected(record: Record) -> str:
    """Return the expected outcome, given the faults that were really injected.

    If faults were missed and no injected fault ends a launch, the run is not expected to be saved.
    """
    wanted = record.run.expect
    if (
        wanted != "saved"
        or not record.missed
        or any(s.what in _DEADLY and s.who != "controller" for s in record.injections)
    ):
        return wanted
    return "unhurt" if all(s.what == "save" for s in record.injections) else "any"


def _expectation(evidence: Evidence, outcome: str, lost: int) -> Iterator[str]:
    wanted = expected(evidence.record)
    if wanted == "saved" and outcome not in COVERED:
        yield f"{lost} finished steps are lost" if lost else "the job should have been saved and restarted but was not"
    if wanted == "unhurt" and outcome != "unhurt":
        yield "a healthy job was restarted"
    if wanted == "refused" and outcome not in ("refused", "kept", "gone"):
        yield f"no checkpoint could be saved, but the outcome is {outcome!r}"
    if wanted == "any" and outcome == "lost" and _should_speak(evidence):
        yield f"{lost} finished steps are lost, and ttp did not report it"


def _should_speak(evidence: Evidence) -> bool:
    """Return whether a process was left that could report why no checkpoint was saved."""
    return bool(evidence.record.injected(*_DISK)) and not evidence.record.injected("term")


def _times(record: Record) -> tuple[float | None, float | None, float | None]:
    """Return ``detect_ms``, ``commit_ms`` and ``back_ms``, measured from the first relevant injection."""
    injections = [s for s in record.injections if s.what not in ("cont", "heal", "disk-heal")]
    deadly = [s for s in injections if s.what in _DEADLY and s.who != "controller"]
    since = min((injection.at_s for injection in deadly or injections), default=None)
    if since is None:
        return None, None, None
    opened = [e.at_s for e in record.told("opened") if e.at_s >= since]
    commits = [(int(e.facts["version"]), -e.at_s) for e in record.told("committed") if e.at_s >= since]
    committed = -max(commits)[1] if commits else None  # both sides of a cut may save the same version
    return (
        _ms(since, min(opened, default=None)),
        _ms(since, committed),
        _ms(since, record.back_s),
    )


def _ms(since_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else round((at_s - since_s) * 1e3, 3)
