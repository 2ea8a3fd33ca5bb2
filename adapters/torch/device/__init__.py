"""Support for accelerators: events, staging buffers, copies to the host that do not wait for the training's stream."""
