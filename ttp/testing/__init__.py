"""Tools that test ttp and may test what is built on it: simulated jobs, enumerated worlds."""
