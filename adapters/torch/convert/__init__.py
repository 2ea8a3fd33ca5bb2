"""One full file out of a checkpoint of any layout, and a checkpoint out of such a file."""
