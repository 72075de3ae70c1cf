"""`python -m kronsched` is the `kronsched` command."""

from kronsched.cli import main

if __name__ == "__main__":
    main()
