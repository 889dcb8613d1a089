"""The commands: demo, check, inspect."""
