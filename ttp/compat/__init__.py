"""Other services' names on this one: programs that were written for them run unchanged."""
