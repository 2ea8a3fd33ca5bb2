"""The messages between controller, ranks and manager, and their decisions: without I/O, clocks and threads."""
