"""What trainers need besides a wrapped loader, each in a module of its own; docs/trainers.md tells which need any."""
