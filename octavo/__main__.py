"""`python -m octavo` is `octavo`."""

from octavo.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
