"""Input that nobody should send, and files that nobody should find: no crash, no hang, no unbounded memory."""
