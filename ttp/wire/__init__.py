"""The wire protocol: protobuf messages and their conversion, gRPC channels, authentication by token, and TLS."""

import os

# Before gRPC is imported. At its default it prints a line for each fork of a data loader's worker, which looks like a
# fault; what the user has set stays.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
