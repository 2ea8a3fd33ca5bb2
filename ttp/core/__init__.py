"""The decisions of ttp: pure functions and sans-I/O machines.

Nothing in this package reads a clock, opens a file or a socket, starts a thread or looks at the environment. Callers
pass the time as an argument, and get everything to be done back as a list of actions. So the code that runs in
production is the code that is checked exhaustively and simulated.
"""
