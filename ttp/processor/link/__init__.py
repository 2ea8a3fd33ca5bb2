"""The stream of a rank to the controller: how it is found, greeted, and reached through the relay of the host."""
