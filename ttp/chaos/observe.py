"""``python -m ttp.chaos.observe ADDRESS PORT``: print a controller's events to stdout, and carry out orders from stdin.

It is a separate process because it has to run in the network of a host. It prints JSON lines: ``{"event": kind, ...}``;
``{"stage": ..., "live": n}`` whenever these change (``stage`` is empty while there is no controller); ``{"answer":
order, ...}``. Orders are JSON lines too: ``{"order": "save"}``, ``{"order": "again"}`` (save and let the ranks continue
in their processes), ``{"order": "report", "ranks": [2]}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from typing import Any

import grpc

from ttp.launch.presence import ask
from ttp.wire.channel import metadata, open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb

REPLAY = 10_000
LOOK_S = 0.1
ANSWER_S = 60.0

_lock = threading.Lock()


def say(**words: Any) -> None:
    """Print one line of JSON on stdout. End the process if stdout is closed."""
    try:
        with _lock:
            sys.stdout.write(json.dumps(words) + "\n")
            sys.stdout.flush()
    except OSError:
        os._exit(0)


def watch(address: str, port: int, token: str) -> None:
    """Print every event of the controllers at this address once; reconnect when a controller ends. Never returns."""
    seen: set[tuple[int, float]] = set()
    while True:
        try:
            with open_channel(address, port) as channel:
                calls = stub(channel).WatchEvents(pb.WatchEventsRequest(replay=REPLAY), metadata=metadata(token))
                for e in calls:
                    if (e.sequence, e.unix_s) in seen:
                        continue
                    seen.add((e.sequence, e.unix_s))
                    say(event=e.kind, incident=e.incident, facts=json.loads(e.json), monotonic_s=e.monotonic_s)
        except grpc.RpcError:
            time.sleep(LOOK_S / 2)


def look(address: str, port: int, token: str) -> None:
    """Print the stage of the job and the number of live ranks whenever one of them changes. Never returns."""
    last: tuple[str, int, int] | None = None
    while True:
        with contextlib.suppress(grpc.RpcError), open_channel(address, port) as channel:
            while True:
                status = stub(channel).GetStatus(pb.GetStatusRequest(), timeout=2, metadata=metadata(token))
                last = _tell((status.stage, sum(r.state == "live" for r in status.ranks), status.pid), last)
                time.sleep(LOOK_S)
        last = _tell(("", 0, 0), last)  # the next try opens a new channel: an old one would wait before it reconnects
        time.sleep(LOOK_S)


def _tell(now: tuple[str, int, int], last: tuple[str, int, int] | None) -> tuple[str, int, int]:
    if now != last:
        say(stage=now[0], live=now[1], monotonic_s=time.monotonic())
    return now


def obey(order: dict[str, Any], address: str, port: int, token: str) -> None:
    """Carry out one order, and print the controller's answer."""
    words: dict[str, Any] = {"answer": order["order"]}
    try:
        if order["order"] in ("save", "again"):
            request = pb.SaveNowRequest(reason="chaos", again=order["order"] == "again")
            saved = ask(address, port, token, "SaveNow", request, ANSWER_S)
            words |= {"saved": saved.saved, "version": saved.version, "text": saved.text}
        else:
            accused = pb.ReportFaultRequest(ranks=order["ranks"], reason="chaos")
            words["text"] = ask(address, port, token, "ReportFault", accused, 5).text
    except grpc.RpcError as problem:
        words["text"] = str(problem)
    say(**words)


def main() -> int:
    """Print events and carry out orders until stdin ends."""
    where = (sys.argv[1], int(sys.argv[2]), os.environ.get("TTP_TOKEN", ""))
    for work in (watch, look):
        threading.Thread(target=work, args=where, daemon=True).start()
    for line in sys.stdin:
        threading.Thread(target=obey, args=(json.loads(line), *where), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
