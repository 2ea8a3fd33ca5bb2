"""Which steps make one version: the order is learned, and a step that does not fit it is refused at once."""

from __future__ import annotations

import pytest

from ttp.adapters.torch.loop.turns import Turns
from ttp.errors import UsageError

D, G = 0, 1


class Loop(Turns):
    """Counts versions."""

    def __init__(self, skipped: bool | None = None) -> None:
        super().__init__(["critic", "generator"], skipped=lambda: self.left_out, scaled=skipped is not None)
        self.left_out = bool(skipped)
        self.versions = 0

    def iteration(self, *steps: int, learns: bool = True, done: bool = False) -> int:
        for number in steps:
            if learns:
                self.backward()
            if self.overdue(number):
                self.end()
            self.step_begins(number)
            if self.step_ended(number):
                self.end()
        if done:
            self.by_hand = True
            self.end()
        return self.versions

    def end(self) -> None:
        self.version_ended()
        self.versions += 1


@pytest.mark.parametrize("order", [(D, G), (G, D)])
def test_a_version_ends_with_the_last_of_the_first_order(order: tuple[int, int]) -> None:
    loop = Loop()
    assert [loop.iteration(*order) for _ in range(3)] == [1, 2, 3]
    assert loop.order == order and loop.is_last(order[1]) and not loop.is_last(order[0])


def test_whether_the_loop_learns_between_the_steps_is_learned() -> None:
    one, two = Loop(), Loop()
    assert one.stands_between, "until the first version has shown it"
    one.iteration(D, G, learns=False)
    two.iteration(D, G)
    assert (one.stands_between, two.stands_between) == (False, True)
    one.iteration(D, G)
    assert one.stands_between, "from now on"


def test_a_critic_that_steps_more_often_needs_step_done() -> None:
    loop = Loop()
    with pytest.raises(UsageError, match=r"critic steps again.*ttp\.step_done\(\) at the end of each"):
        for _ in range(2):
            loop.iteration(D, D, D, G)
    assert loop.versions == 0, "nothing was counted wrongly"


def test_the_generator_of_every_second_iteration_is_found_at_the_first_that_has_none() -> None:
    loop = Loop()
    assert loop.iteration(D, G) == 1
    loop.iteration(D)
    with pytest.raises(UsageError, match=r"critic steps again.*critic stepped before"):
        loop.iteration(D)
    assert loop.versions == 1


def test_another_order_is_refused_before_a_version_ends_in_mid_iteration() -> None:
    loop = Loop()
    loop.iteration(D, G)
    with pytest.raises(UsageError, match="generator steps again or out of turn"):
        loop.iteration(G, D)


@pytest.mark.parametrize("first", [(D, D, D, G), (D, G), (G,)])
def test_step_done_makes_any_number_of_steps_a_version(first: tuple[int, ...]) -> None:
    loop = Loop()
    loop.iteration(*first, done=len(set(first)) < 2 or len(first) > 2)
    loop.by_hand = True  # the other loop calls it behind the end that was seen
    for steps in ((D, D, G), (D,), (G, D, D, D)):
        loop.iteration(*steps, done=True)
    assert loop.versions == 4


def test_a_loop_that_never_ends_an_iteration_is_told() -> None:
    loop = Loop()
    with pytest.raises(UsageError, match="that order is not known yet"):
        loop.iteration(*[D] * 2000)


def test_steps_that_make_no_version_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """One network is trained alone at first."""
    loop = Loop()
    loop.iteration(*[D] * 19)
    assert not caplog.records
    loop.iteration(*[D] * 100)
    (record,) = caplog.records
    assert "before generator has stepped: the 20 steps so far would be lost" in record.getMessage()
    caplog.clear()
    for loop in (Loop(), Loop()):
        loop.by_hand = True
        loop.iteration(*[D] * 40, done=True)
        loop.iteration(*[D] * 19, G, done=True)
    assert not caplog.records


class TestUnderAScaler:
    def test_a_last_step_left_out_ends_the_version_at_the_next_one(self) -> None:
        loop = Loop(skipped=True)
        assert loop.iteration(D, G) == 1
        loop.iteration(D)
        assert loop.iteration(D, G) == 3

    def test_a_first_step_left_out_changes_nothing(self) -> None:
        loop = Loop(skipped=True)
        loop.iteration(D, G)
        assert loop.iteration(G) == 2 and loop.iteration(D, G) == 3

    def test_before_the_order_is_known(self) -> None:
        loop = Loop(skipped=True)
        loop.iteration(D)
        assert loop.iteration(D, G) == 2 and loop.order == (D, G)

    def test_without_a_skip_it_is_as_irregular_as_ever(self) -> None:
        loop = Loop(skipped=False)
        loop.iteration(D, G)
        with pytest.raises(UsageError, match="critic steps again"):
            loop.iteration(D, D, G)


def test_those_of_a_chain_may_stay_out() -> None:
    chain = Turns(["dense", "expert"], chained=True)
    for number in (1, 0, 1):
        chain.step_begins(number)
        assert chain.step_ended(number) == (number == 1)
        if number == 1:
            chain.version_ended()
