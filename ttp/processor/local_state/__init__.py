"""Rank-local state in shared memory, in pages that outlive their process."""
