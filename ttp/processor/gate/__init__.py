"""The gate before an update, and the shared memory in which the ranks of a host wait for each other."""
