"""ClusterD's messages as notices to the controller of a job with handlers, and the controller's calls as messages."""

from __future__ import annotations

from typing import Any

import pytest

from ttp.core.layout import Rank
from ttp.mindio.clusterd_manager import Interpreter
from ttp.mindio.protocol.manager_messages import FaultOf, Notice, NoticeKind, RankFault
from ttp.wire.v1 import recover_pb2 as pb

HOSTS = ((0, 1), (2, 3))
PROCESS = tuple(RankFault(Rank(rank), FaultOf.PROCESS) for rank in range(4))
MIXED = RankFault(Rank(1), FaultOf.NETWORK), RankFault(Rank(2), FaultOf.MEMORY)


def signal(kind: str, *actions: str, faults: dict[int, str] | None = None, **fields: Any) -> pb.RecoverSignal:
    named = [pb.RecoverFault(rank_id=str(rank), fault_type=what) for rank, what in (faults or {}).items()]
    fields = {"uuid": "u", "job_id": "job", **fields}
    return pb.RecoverSignal(signal_type=kind, actions=actions, fault_ranks=named, **fields)


def dump(faults: tuple[RankFault, ...]) -> list[Notice]:
    told = [Notice(kind, faults) for kind in (NoticeKind.STOP_TRAIN, NoticeKind.GLOBAL_RANK)]
    return [*told, Notice(NoticeKind.STRATEGY, strategy="dump")]


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (signal("stopTrain", "stop_train", faults={1: "1"}), [Notice(NoticeKind.STOP_TRAIN, (PROCESS[1],))]),
        (signal("stopTrain", "stop_train", faults={2: "0", 1: "2"}), [Notice(NoticeKind.STOP_TRAIN, MIXED)]),
        (signal("stopTrain", "pause_train", timeout=15), [Notice(NoticeKind.PAUSE_TRAIN, (), 15.0)]),
        (signal("globalFault", faults={1: "1"}), [Notice(NoticeKind.GLOBAL_RANK, (PROCESS[1],))]),
        *(
            (signal("changeStrategy", change_strategy=name, extra_params="{}"),
             [Notice(NoticeKind.STRATEGY, strategy=name, params="{}")])
            for name in ("retry", "recover", "dump", "exit", "continue", "migration", "downgrade", "upgrade")
        ),
        (signal("saveAndExit", node_rank_ids=["1"]), dump(PROCESS[2:])),
        (signal("saveAndExit"), dump(PROCESS)),
        (signal("hot-switch", "hot switch", faults={1: "1"}), [Notice(NoticeKind.HOT_SWITCH, (PROCESS[1],))]),
        (signal("hot-switch", "stop switch"), [Notice(NoticeKind.STOP_SWITCH)]),
        (signal("hot-switch", "new pod running"), []),
        (signal("keep-alive"), []),
        (signal("stopTrain", job_id="another"), []),
    ],
    ids=lambda value: value.signal_type if isinstance(value, pb.RecoverSignal) else "",
)  # fmt: skip
def test_what_clusterd_says(said: pb.RecoverSignal, means: list[Notice]) -> None:
    interpreter = Interpreter("job")
    assert interpreter.notices(said, HOSTS) == means
    assert interpreter.notices(said, HOSTS) == []  # it is sent again until it is answered


def test_what_it_is_told() -> None:
    interpreter, faults = Interpreter("job"), {3: 1, 0: 0}
    named = [("0", "0"), ("3", "1")]
    for told in (
        interpreter.fault_ranks(faults),
        interpreter.stop_complete(0, "stopped", faults),
        interpreter.strategies(faults, ["exit", "dump", "recover"]),
    ):
        assert (told.job_id, [(f.rank_id, f.fault_type) for f in told.fault_ranks]) == ("job", named)
    result = interpreter.result(406, "no", "upgrade")
    assert (result.status.code, result.status.info, result.strategy) == (406, "no", "upgrade")
