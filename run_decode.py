"""The decode script: `python run_decode.py --prompt "..."` is `v4flash decode --prompt "..."`.

Knows: the name of the command. Does not know: its options, which live in `v4flash.cli`.
"""

import sys

from v4flash.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["decode", *sys.argv[1:]]))
