"""The stream of a rank to the controller: how it is found, opened, and passed through the relay of the host."""

import ttp.wire  # noqa: F401 - before gRPC: it sets how much gRPC prints
