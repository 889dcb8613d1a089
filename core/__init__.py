"""midepoch makes any data iterable resume in the middle of an epoch: exactly, at once, and elastically."""
