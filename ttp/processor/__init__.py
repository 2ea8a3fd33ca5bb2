"""The part of ttp inside a rank: the gate, the rank-local page, the stream to the controller, the saver."""
