"""What an adapter is, and the wrapped loader: where it stands, and the rules of iteration, once for all sources."""
