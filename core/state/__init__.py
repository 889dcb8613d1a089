"""What is saved: the fixed keys, their checks, texts for the states of others, parts of ranks."""
