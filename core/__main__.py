"""`python -m midepoch` is `midepoch`."""

from .tools.cli import main

if __name__ == "__main__":
    main()
