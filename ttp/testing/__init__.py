"""Tools that test ttp and programs that use it: the simulator of whole jobs, and ``kit``, which kills ranks."""
