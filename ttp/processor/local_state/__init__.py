"""What only one rank has, as pages in shared memory that outlive their process."""
