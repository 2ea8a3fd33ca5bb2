"""Scripts are read as they were written, and every mistake in one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttp.chaos.reading import parse, read
from ttp.chaos.script import Fault, to_toml
from ttp.chaos.vocabulary import Target
from ttp.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "chaos").glob("*.toml"))

GOOD = """
hosts = 2
ranks_per_host = 2
steps = 20

[env]
TTP_GRACE_S = "2"

[[fault]]
name = "first"
step = 2
phase = "backward"
who = "rank 3"
what = "kill"

[[fault]]
event = "plan"
who = "saver"
what = "stop"

[[fault]]
after = "first"
seconds = 1
who = "host 1"
what = "partition"

[[fault]]
run = "all at once"
expect = "any"
step = 6
phase = "data"
who = "ranks 0 1, 2,3"
what = "kill"
"""


def test_a_script_says_what_is_done_when_and_to_whom() -> None:
    script = parse(GOOD)
    first, second = script.runs
    assert [str(fault.who) for fault in first.faults] == ["rank 3", "saver", "host 1"]
    assert first.faults[2] == Fault("fault 3", "partition", Target("host", (1,)), after="first", seconds=1)
    assert (first.title, first.expect, first.step) == ("kill rank 3", "saved", 2)
    assert (second.title, second.expect, second.step) == ("all at once", "any", 6)
    assert second.faults[0].who.numbers == (0, 1, 2, 3)
    assert script.env == (("TTP_GRACE_S", "2"),)
    assert script.needs == {"hosts"}


def test_what_is_written_is_read_back() -> None:
    script = parse(GOOD)
    assert parse(to_toml(script)) == script


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_scripts(path: Path) -> None:
    script = read(path)
    assert script.runs and parse(to_toml(script)) == script


def test_a_random_target_is_the_same_every_time() -> None:
    text = GOOD.replace('"rank 3"', '"random"')
    drawn = {parse(text.replace("steps = 20", f"steps = 20\nseed = {seed}")).faults[0].who for seed in range(30)}
    assert drawn == {Target("ranks", (rank,)) for rank in range(4)}
    assert parse(text).faults[0].who == parse(text).faults[0].who


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ("host = 2", "hosts = 2", "'host' is not a key; did you mean 'hosts'?"),
        ("hosts = 0", "hosts = 2", "hosts = 0: it has to be at least 1"),
        ("hosts = true", "hosts = 2", "hosts = True has to be a whole number"),
        ('steps = "20"', "steps = 20", "steps = '20' has to be a whole number"),
        ('launcher = "torchrn"\nsteps = 20', "steps = 20", "did you mean 'torchrun'?"),
        ("TTP_GRACE", "TTP_GRACE_S", "did you mean 'TTP_GRACE_S'?"),
        ("TTP_GRACE_S = 2", 'TTP_GRACE_S = "2"', "has to be a text"),
        ('TTP_GRACE_S = "-2"', 'TTP_GRACE_S = "2"', "expected a number of seconds above 0"),
        ('phase = "backwards"', 'phase = "backward"', "fault 1: phase: 'backwards' is not a phase; did you mean"),
        ('event = "plans"', 'event = "plan"', "fault 2: event: 'plans' is not an event; did you mean 'plan'?"),
        ('what = "kil"', 'what = "kill"', "did you mean 'kill'?"),
        ('who = "rank 4"', 'who = "rank 3"', "fault 1: there is no rank 4"),
        ('who = "host 2"', 'who = "host 1"', "fault 3: there is no host 2"),
        ('who = "hosts 0 1"', 'who = "host 1"', "'hosts 0 1' is not a target"),
        ('who = "disk"', 'who = "host 1"', "partition cannot be done to disk, only to host"),
        ('what = "raise"', 'what = "stop"', "raise cannot be done to saver"),
        ("hosts = 1\nranks_per_host = 4", "hosts = 2\nranks_per_host = 2", "partition needs several hosts"),
        ('step = 2\nevent = "plan"\n', "step = 2\n", "exactly one of"),
        ("", 'event = "plan"\n', "exactly one of"),
        ("", "step = 2\n", "phase 'backward' needs a step"),
        ("", 'phase = "backward"\n', "a step needs a phase"),
        ('after = "frist"', 'after = "first"', "did you mean 'first'?"),
        ('name = "fault 2"', 'name = "first"', "two faults are named 'fault 2'"),
        ("step = 3", "step = 6", "step 3 comes too soon after 2"),
        ("step = 19", "step = 6", "step 19 is too late"),
        ("seconds = -1", "seconds = 1", "from 0 to 600"),
        ('expect = "fine"', 'expect = "any"', "'fine' is not an outcome"),
        ('event = "plan"\nrun = "x"', 'event = "plan"', "run belong to the first fault of a run"),
        ("[[falt]]", "[[fault]]", "did you mean 'fault'?"),
        ("hosts = ", "hosts = 2", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(wrong: str, right: str, said: str) -> None:
    assert right in GOOD
    text = GOOD.replace(right, wrong, 1)
    with pytest.raises(ConfigError) as refused:
        parse(text, "mine.toml")
    assert said in str(refused.value)
    assert str(refused.value).startswith("mine.toml")
