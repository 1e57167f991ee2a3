"""`python -m v4flash` is the `v4flash` command. Knows: nothing but where its entry is."""

from v4flash.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
