"""Second copies of shards in the memory of another host."""
