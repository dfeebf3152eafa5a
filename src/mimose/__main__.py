"""`python -m mimose`: the same as the command `mimose`."""

from mimose.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
