"""Tools to test ttp and programs that use it: simulated jobs, small worlds in every state, disks that fail."""
