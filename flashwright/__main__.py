"""The command `flashwright`, also as `python -m flashwright`.

The imports take a part of a second. Ctrl-C ends them as it ends a command: without a traceback.
"""

import sys

INTERRUPTED = 130


def main() -> None:
    """Import the command line and run it."""
    try:
        from flashwright.cli.main import main as command

        command()
    except KeyboardInterrupt:  # before a command began, or while it ended
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
