"""One random stream for each sample; the caller's generators stay as they were."""
