"""What goes over the wire, and how it is turned into values of the core."""
