"""`python -m flashwright` is the command `flashwright`."""

from flashwright.cli.main import main

if __name__ == "__main__":
    main()
