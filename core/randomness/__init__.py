"""One random stream for each sample. The caller's generators are left unchanged."""
