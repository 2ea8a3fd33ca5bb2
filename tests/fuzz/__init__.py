"""Malformed input and files: no crash, no hang, no unbounded memory."""
