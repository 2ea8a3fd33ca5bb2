"""Accelerators: events, fences, staging buffers, and copies to the host that do not wait for the training's stream."""
