"""`python -m gradsync`: the same as the `gradsync` command."""

from gradsync.cli import main

if __name__ == "__main__":
    main()
