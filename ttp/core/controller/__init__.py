"""The controller's side of the protocol: events in, actions out. Start with ``machine``."""
