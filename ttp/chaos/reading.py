"""Parse the TOML text of a script to a ``Script``. Errors name the place, and the closest known word."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ttp.chaos.script import Fault, Run, Script, settled, usual_outcome
from ttp.chaos.vocabulary import (
    CALLED_PHASES,
    EVENTS,
    EXPECTED,
    FAULT_WORDS,
    LAUNCHERS,
    RESTARTS,
    START_PHASES,
    STEP_PHASES,
    Target,
    parse_target,
)
from ttp.config import Config
from ttp.errors import ConfigError, ToldAs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _plain(kind: type) -> dict[str, type]:
    """Return the fields of a dataclass that are booleans, numbers or texts, perhaps optional, with their types."""
    hints = {name: (get_args(hint) or (hint,))[0] for name, hint in get_type_hints(kind).items()}
    return {name: hint for name, hint in hints.items() if hint in (bool, float, int, str)}


JOB_KEYS: dict[str, type] = {**_plain(Script), "env": dict, "fault": list}
FAULT_KEYS: dict[str, type] = {**_plain(Fault), "run": str, "expect": str, "who": str}
KINDS: dict[type, str] = {
    bool: "true or false",
    dict: "a table",
    float: "a number",
    int: "a whole number",
    list: "[[fault]]",
    str: "a text",
}
WORLD_MAX = 64
_OF_STEPS = (*STEP_PHASES, *CALLED_PHASES)


def read(path: Path) -> Script:
    """Read the script in a file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or is not a valid script; the text names the place.
    """
    with ToldAs(ConfigError, f"cannot read the script {path}", OSError, UnicodeDecodeError):
        return parse(path.read_text(encoding="utf-8"), str(path))


def parse(text: str, name: str = "script") -> Script:
    """Parse a script; ``name`` is its name in errors. Raises the same errors as ``read``."""
    with ToldAs(ConfigError, f"{name} is not valid TOML", tomllib.TOMLDecodeError):
        content = tomllib.loads(text)
    with ToldAs(ConfigError, name, ConfigError):
        return _script(content)


def _script(content: Mapping[str, Any]) -> Script:
    _check_keys(content, JOB_KEYS, "the job")
    job = {key: content[key] for key in JOB_KEYS if key in content and key not in ("env", "fault")}
    script = Script(**job, env=_env(content.get("env", {})))
    _check_job(script)
    faults = [_fault(table, index, script) for index, table in enumerate(content.get("fault", []))]
    names = [fault.name for fault, _ in faults]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two faults are named {twice[0]!r}")
    script = script.only(_runs(faults, script))
    _check_runs(script)
    return script


def _env(table: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    known = {f.metadata["env"] for f in fields(Config)}
    for name, value in table.items():
        check_known(name, known, "a setting of ttp", "env")
        if not isinstance(value, str):
            raise ConfigError(f"env: {name} = {value!r} has to be a text, in quotes")
    Config.from_env(dict(table))
    return tuple(sorted(table.items()))


def _check_job(script: Script) -> None:
    for key in ("hosts", "ranks_per_host", "steps", "width"):
        if getattr(script, key) < 1:
            raise ConfigError(f"{key} = {getattr(script, key)}: it has to be at least 1")
    if not 0 <= script.step_ms <= 60_000:
        raise ConfigError(f"step_ms = {script.step_ms}: it has to be from 0 to 60000")
    if script.world_size > WORLD_MAX or script.hosts > 16:
        raise ConfigError(f"{script.hosts} hosts with {script.ranks_per_host} ranks each are too many for one machine")
    check_known(script.launcher, LAUNCHERS, "a launcher", "launcher")
    check_known(script.restart, RESTARTS, "a way to restart the job", "restart")


# ------------------------------------------------------------------------------------------------------------- faults


def _fault(table: Any, index: int, script: Script) -> tuple[Fault, dict[str, str]]:
    """Return the fault in a table, and the keys ``run`` and ``expect`` of the table, which are about its run."""
    where = f"fault {index + 1}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} has to be a table: [[fault]]")
    _check_keys(table, FAULT_KEYS, where)
    for key in ("who", "what"):
        if key not in table and not (key == "who" and str(table.get("what", "")).startswith("disk-")):
            raise ConfigError(f"{where} has no key '{key}'")
    words: dict[str, Any] = {key: table[key] for key in table if key not in ("who", "run", "expect")}
    target = _target(table.get("who", "disk"), where)
    fault = Fault(**{"name": f"fault {index + 1}"} | words, who=target)
    fault = settled(fault, script.seed, index, script.world_size)
    _check_words(fault, where)
    _check_target(fault, script, where)
    return fault, {key: table[key] for key in ("run", "expect") if key in table}


def _target(text: str, where: str) -> Target:
    target = parse_target(text)
    if target is None:
        examples = (
            "rank 2, ranks 0 3, host 1, all, bystander, committer, controller, disk, launcher, random, saver, template"
        )
        raise ConfigError(f"{where}: who = {text!r} is not a target; examples: {examples}")
    return target


def _check_words(fault: Fault, where: str) -> None:
    check_known(fault.what, FAULT_WORDS, "a kind of fault", f"{where}: what")
    if fault.phase:
        check_known(fault.phase, (*_OF_STEPS, *START_PHASES), "a phase", f"{where}: phase")
    if fault.event:
        check_known(fault.event, EVENTS, "an event", f"{where}: event")
    told = [bool(fault.phase) or fault.step is not None, bool(fault.event), bool(fault.after)]
    if sum(told) != 1:
        raise ConfigError(f"{where} needs exactly one of these to say when it happens: step with phase, event, after")
    if fault.step is not None and fault.phase not in _OF_STEPS:
        raise ConfigError(f"{where}: a step needs a phase, one of {', '.join(_OF_STEPS)}")
    if fault.phase in _OF_STEPS and fault.step is None:
        raise ConfigError(f"{where}: phase {fault.phase!r} needs a step")
    if not 0 <= fault.seconds <= 600:
        raise ConfigError(f"{where}: seconds = {fault.seconds:g}: it has to be from 0 to 600")


def _check_target(fault: Fault, script: Script, where: str) -> None:
    known = FAULT_WORDS[fault.what]
    if fault.who.kind not in known.targets:
        raise ConfigError(f"{where}: {fault.what} cannot be done to {fault.who}, only to {', '.join(known.targets)}")
    if known.inside and (not fault.phase or fault.seconds):
        raise ConfigError(f"{where}: a rank carries out {fault.what!r} itself, so it needs a phase, and no seconds")
    if known.needs == "hosts" and script.hosts < 2:
        raise ConfigError(f"{where}: {fault.what} needs several hosts, but hosts = {script.hosts}")
    most = script.hosts if fault.who.kind == "host" else script.world_size
    for number in (*fault.who.numbers, *([] if fault.seen_by is None else [fault.seen_by])):
        limit = most if number in fault.who.numbers else script.world_size
        if not 0 <= number < limit:
            raise ConfigError(f"{where}: there is no {'host' if limit != script.world_size else 'rank'} {number}")


# --------------------------------------------------------------------------------------------------------------- runs


def _runs(faults: Sequence[tuple[Fault, dict[str, str]]], script: Script) -> tuple[Run, ...]:
    groups: list[list[tuple[Fault, dict[str, str]]]] = []
    for fault, said in faults:
        begins = fault.step is not None and (not groups or fault.step != groups[-1][0][0].step)
        if begins:
            groups.append([])
        elif not groups:
            raise ConfigError(f"{fault.name}: the first fault needs a step and a phase")
        groups[-1].append((fault, said))
    return tuple(_run(group, script) for group in groups)


def _run(group: Sequence[tuple[Fault, dict[str, str]]], script: Script) -> Run:
    faults = tuple(fault for fault, _ in group)
    for fault, said in group[1:]:
        if said:
            raise ConfigError(f"{fault.name}: {' and '.join(said)} belong to the first fault of a run")
    said = group[0][1]
    expect = said.get("expect", usual_outcome(faults, script.world_size))
    check_known(expect, EXPECTED, "an outcome", f"{faults[0].name}: expect")
    return Run(said.get("run", f"{faults[0].what} {faults[0].who}"), faults, expect)


def _check_runs(script: Script) -> None:
    last = -2
    for run in script.runs:
        if run.step < last + 2:
            raise ConfigError(
                f"step {run.step} comes too soon after {last}: each run has to begin at least 2 steps after the last"
            )
        if run.step > script.steps - 2:
            raise ConfigError(
                f"step {run.step} is too late: at least one more of the {script.steps} steps has to follow it"
            )
        last = run.step
        earlier: set[str] = set()
        for fault in run.faults:
            if fault.after and fault.after not in earlier:
                check_known(fault.after, earlier, "an earlier fault of the same run", f"{fault.name}: after")
            earlier.add(fault.name)


# -------------------------------------------------------------------------------------------------------------- words


def _check_keys(table: Mapping[str, Any], known: Mapping[str, type], where: str) -> None:
    for key, value in table.items():
        check_known(key, known, "a key", where)
        wanted = known[key]
        fits = isinstance(value, (int, float) if wanted is float else wanted)
        if not fits or isinstance(value, bool) != (wanted is bool):
            raise ConfigError(f"{where}: {key} = {value!r} has to be {KINDS[wanted]}")


def check_known(word: str, known: Collection[str], kind: str, where: str) -> None:
    """Raise ``ConfigError`` unless ``word`` is one of ``known``; the text names the closest known word."""
    if word in known:
        return
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known)) or 'none'}"
    raise ConfigError(f"{where}: {word!r} is not {kind}; {hint}")
