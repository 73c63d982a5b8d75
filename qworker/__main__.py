"""``python -m qworker``."""

from qworker.cli.main import main

if __name__ == "__main__":
    main()
