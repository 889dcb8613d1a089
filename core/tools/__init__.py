"""The commands: check, inspect."""
