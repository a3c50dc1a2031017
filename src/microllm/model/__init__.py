"""The Transformer and how a checkpoint becomes one."""
