"""The saved state: its keys, its checks, foreign states as text, and the parts of ranks."""
