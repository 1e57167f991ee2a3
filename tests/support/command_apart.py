"""The `v4flash` command, run apart on several devices; arguments as the command's."""

import sys

from v4flash.cli import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
