"""Checkpoints, configs and text: everything that is read from or written to a file."""
