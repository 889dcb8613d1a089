"""What trainers need besides a wrapped loader, in one module each. docs/trainers.md says which need anything."""
