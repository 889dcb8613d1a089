"""One module for each backend. Nothing here is imported before a source of that backend is wrapped."""
