"""The checks of a chaos run: a good run has no findings, and each kind of tampered evidence has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.evidence import AT_S, FIRST, SECOND, Story, life, seen
from ttp.chaos.checks import Judgement, diverges, expected, judge
from ttp.chaos.notes import RankLife
from ttp.chaos.record import Found, Injection
from ttp.chaos.script import Fault, Script
from ttp.chaos.vocabulary import Target


def verdict(story: Story) -> Judgement:
    return judge(story.evidence())


def test_a_good_run_is_saved_and_has_no_findings() -> None:
    assert verdict(Story()) == Judgement("saved", (), 5, 0, 2.0, 50.0, 4000.0) and not diverges(Story().evidence())


def resume_from(story: Story, version: int) -> None:
    for rank, lives in story.notes.items():
        lives[SECOND] = life(rank, version, version + 2)


def change(story: Story, rank: int, **fields: object) -> None:
    """Change a rank's second life."""
    story.notes[rank][SECOND] = replace(story.notes[rank][SECOND], **fields)  # type: ignore[arg-type]


def change_weights(story: Story) -> None:
    change(story, 0, start_digests=("other", "own 0 5"))


def resume_from_the_future(story: Story) -> None:
    story.found = [*story.found, Found(7)]
    resume_from(story, 7)


Tampering = Callable[[Story], object]


def put(**fields: object) -> Tampering:
    """Return a tampering that sets fields of the story."""
    return lambda story: vars(story).update(fields)


EVENTS = Story().events
FULL = [*Story().injections, Injection("full", "disk-full", "disk", AT_S, FIRST)]
TAMPERINGS: dict[str, tuple[Tampering, str]] = {
    "a step is lost": (lambda story: resume_from(story, 2), "3 finished steps are lost"),
    "resumed from the future": (resume_from_the_future, "no rank had begun a newer one than 6"),
    "resumed from nowhere": (put(found=[Found(2)]), "the whole checkpoints are [2]"),
    "resumed differently": (
        lambda story: story.notes[2].update({SECOND: life(2, 4, 7)}),
        "resumed from different versions",
    ),
    "a broken checkpoint": (
        put(found=[Found(2), Found(5, ("piece __0_0.distcp is damaged",))]),
        "the checkpoint of version 5 is not whole: piece __0_0.distcp is damaged",
    ),
    "the one before is broken": (
        put(found=[Found(2, ("piece __0_0.distcp is missing",)), Found(5)]),
        "the checkpoint of version 2 is not whole",
    ),
    "the future is committed": (put(events=[*EVENTS, seen("committed", version=9)]), "version 9 was committed"),
    "other weights": (change_weights, "rank 0: weights or moments restored for version 5"),
    "other random streams": (
        lambda story: change(story, 1, start_digests=("shard 5", "other")),
        "rank 1: its own state restored for version 5",
    ),
    "a later step differs": (
        lambda story: change(story, 2, states={6: ("shard 6", "own 2 6"), 7: ("other", "own 2 7")}),
        "rank 2: from version 7 on its bits",
    ),
    "a page is lost": (put(found=[Found(2), Found(5, (), (1,))]), "rank-local state of ranks [1] was not saved"),
    "a healthy job is restarted": (put(expect="unhurt"), "a healthy job was restarted"),
    "never restarted": (put(lives=[FIRST]), "should have been saved and restarted"),
    "stuck": (put(trouble="the run did not end within 300 s"), "the run did not end within 300 s"),
    "a forgotten request": (
        put(answers=[{"answer": "save", "saved": True, "version": 4}]),
        "version 4 was reported as saved, but there is no such checkpoint",
    ),
    "another exit code": (put(exits=[1, -9]), "exit codes [1, -9], and none of them is 75"),
    "no errno": (
        put(injections=FULL, events=[*EVENTS, seen("save_failed", text="it did not work")]),
        "a save failed without its errno",
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_tampering_is_found(name: str) -> None:
    tamper, said = TAMPERINGS[name]
    story = Story()
    tamper(story)
    findings = verdict(story).findings
    assert any(said in finding for finding in findings), findings


def test_the_number_of_an_error_is_found_as_each_part_of_ttp_writes_it() -> None:
    told = [seen("save_failed", text="OSError: [errno 28] full"), seen("commit_failed", text="full: [Errno 28]")]
    findings = verdict(Story(injections=FULL, events=[*EVENTS, *told])).findings
    assert not any("errno" in finding for finding in findings), findings


def test_launchers_say_what_came_of_it() -> None:
    assert verdict(Story(exits=[75, -9])).findings == ()
    assert verdict(Story(Script(1, 3, launcher="torchrun"), exits=[1])).findings == ()


def test_what_only_the_dead_had_is_not_lost() -> None:
    """Rank 0, which had finished version 5, died: version 4 is the newest that can be read."""
    story = Story(
        injections=[Injection("first", "kill", "rank 0", AT_S, FIRST, frozenset({0}))], found=[Found(2), Found(4)]
    )
    story.events = [seen("committed", version=4)]
    resume_from(story, 4)
    assert (verdict(story).outcome, verdict(story).findings) == ("saved", ())


def test_nobody_is_left() -> None:
    story = Story(
        injections=[Injection("first", "kill", "ranks 0 1 2", AT_S, FIRST, frozenset({0, 1, 2}))], expect="any"
    )
    story.events, story.found = [], [Found(2)]
    resume_from(story, 2)
    assert (verdict(story).outcome, verdict(story).findings) == ("gone", ())


def test_nothing_was_newer() -> None:
    story = Story(events=[seen("opened", AT_S + 0.002)], found=[Found(2)])
    for rank, lives in story.notes.items():
        lives[FIRST] = life(rank, 2, 2, 3)
    resume_from(story, 2)
    assert (verdict(story).outcome, verdict(story).findings) == ("kept", ())


def test_a_refusal_is_told_from_a_loss() -> None:
    story = Story(expect="refused", found=[Found(2)], events=[seen("released", exit_code=70)])
    resume_from(story, 2)
    assert (verdict(story).outcome, verdict(story).lost_steps, verdict(story).findings) == ("refused", 3, ())
    story.events = []
    assert verdict(story).outcome == "lost" and verdict(story).findings


def test_across_a_cut_either_side_may_go_on() -> None:
    cut = Injection("first", "partition", "host 1", AT_S, FIRST, cut_off=frozenset({0}))
    story = Story(Script(3, 1), injections=[cut], found=[Found(2), Found(4, (), (0,))])
    story.events = [seen("committed", version=4)]
    resume_from(story, 4)
    answer = verdict(story)
    assert (answer.outcome, answer.findings, diverges(story.evidence())) == ("saved", (), True)


def host_is_lost(script: Script) -> Story:
    """Return a story in which rank 1, alone on its host, dies with the host, so its page is lost."""
    story = Story(script, found=[Found(2), Found(5, (), (1,))])
    change(story, 1, start_digests=("shard 5", "re-derived"), states={6: ("other", "other")})
    return story


def test_a_lost_host_costs_its_random_streams_unless_they_are_mirrored() -> None:
    alone = host_is_lost(Script(3, 1))
    assert (verdict(alone).findings, diverges(alone.evidence())) == ((), True)
    mirrored = Script(3, 1, env=(("TTP_MIRROR", "on"),))
    assert "rank-local state of ranks [1] was not saved" in verdict(host_is_lost(mirrored)).findings[0]


def test_a_quota_may_cost_the_page_of_its_rank() -> None:
    poor = host_is_lost(Script(1, 3))
    assert "rank-local state of ranks [1] was not saved" in verdict(poor).findings[0]
    poor.injections.append(Injection("quota", "disk-quota", "rank 1", AT_S, FIRST))
    assert verdict(poor).findings == ()


def test_a_copy_may_be_late_where_it_is_sent_beside_the_training() -> None:
    mirrored = Script(3, 1, env=(("TTP_MIRROR", "on"),))
    late = host_is_lost(mirrored)
    late.found = [Found(2), Found(5, (), (), (1,))]
    assert verdict(late).findings, "rank 1 died in the update, so its copy of the version before was the right one"
    late.notes[1][FIRST] = life(1, 2, 5)
    assert (verdict(late).findings, diverges(late.evidence())) == ((), True)


def test_bits_have_no_reference_after_a_host_was_lost() -> None:
    story = Story(diverged=True)
    change_weights(story)
    assert verdict(story).findings == () and diverges(story.evidence())


def test_a_second_fault_in_a_second_life() -> None:
    """The rank is killed again after the restart, before any step, and resumes from the same version."""
    third = (0, 2)
    again = Injection("second", "kill", "rank 0", AT_S + 3, SECOND, frozenset({0}))
    story = Story(lives=[FIRST, SECOND, third])
    story.injections.append(again)
    for rank, lives in story.notes.items():
        lives[SECOND], lives[third] = (RankLife(5, lives[SECOND].start_digests, 5, 5), life(rank, 5, 7))
    assert (verdict(story).outcome, verdict(story).version, verdict(story).findings) == ("saved", 5, ())


def test_times_count_from_the_first_fault_that_no_job_survives() -> None:
    story = Story(faults=(Fault("first", "kill", Target("controller"), 5, "backward"),))
    story.injections.insert(0, Injection("zero", "kill", "controller", AT_S - 2, FIRST))
    assert (verdict(story).detect_ms, verdict(story).commit_ms) == (2.0, 50.0)


class TestWhatNeverCame:
    """A rank was to be killed during a checkpoint on request, but there was nothing new to save."""

    def story(self) -> Story:
        injection = Injection("first", "save", "controller", AT_S, FIRST, frozenset())
        story = Story(injections=[injection], missed=["second: its moment never came (saved)"], lives=[FIRST])
        story.events = []
        return story

    def test_is_not_expected_to_end_the_job(self) -> None:
        story = self.story()
        assert expected(story.evidence().record) == "unhurt"
        assert verdict(story).outcome == "unhurt"
        assert verdict(story).findings == ()

    def test_a_restart_has_no_reason_then(self) -> None:
        story = self.story()
        story.lives = [FIRST, SECOND]
        assert "a healthy job was restarted" in verdict(story).findings

    def test_what_came_counts(self) -> None:
        story = self.story()
        story.injections += Story().injections
        assert expected(story.evidence().record) == "saved"
        assert "the job should have been saved and restarted but was not" in verdict(story).findings
