"""The wire protocol: protobuf messages and their conversion, gRPC channels, authentication by token, and TLS."""
