"""Signs of life, seen from outside a process: robust futexes, sentinels, signals, stacks."""
