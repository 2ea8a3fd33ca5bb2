"""The decisions of ttp: pure functions and sans-I/O machines.

Nothing in this package reads a clock, opens a file or a socket, starts a thread or looks at the environment. Time is
passed in as an argument, and everything to be done is returned as a list of actions. That lets the same code be checked
exhaustively, simulated by the million and run at three in the morning.
"""
