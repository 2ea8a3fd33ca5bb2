"""Signs of life of a process that others can see: robust futexes, sentinels, signals, stacks."""
