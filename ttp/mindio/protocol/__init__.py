"""What controller, ranks and manager say to each other and decide: no I/O, no clock, no threads."""
