"""What stands before an update: the gate of this rank, and the memory in which ranks of a host wait for each other."""
