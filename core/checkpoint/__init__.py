"""Snapshot: model, optimizer, loader and generators in one file that survives any kill."""
