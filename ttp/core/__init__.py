"""The decisions of ttp: pure functions and sans-I/O machines.

Nothing in this package reads a clock, opens a file or a socket, starts a thread or looks at the environment. Time comes
in as an argument, everything to be done goes out as a list of actions. That is what lets the same code be checked
exhaustively, simulated by the million and run at three in the morning.
"""
