"""Torch's rendezvous with something of ours around it."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo


class WrappedRendezvous(RendezvousHandler):
    """Asks the rendezvous that it is made of for everything.

    Args:
        inner: torch's.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes."""
        info: RendezvousInfo = self._inner.next_rendezvous()
        return info

    @property
    def use_agent_store(self) -> bool:
        """Whether workers connect to a store that runs in an agent."""
        return bool(self._inner.use_agent_store)

    def get_backend(self) -> str:
        """The name of torch's rendezvous."""
        return str(self._inner.get_backend())

    def is_closed(self) -> bool:
        """See torch."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """See torch."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """See torch."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """See torch."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """See torch."""
        return bool(self._inner.shutdown())
