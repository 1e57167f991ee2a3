"""`v4flash experts ACTION`: which experts texts choose.

Knows: the list of actions. Does not know: what they do; each has a name, a help text, `add_arguments(parser)` and
`run(options) -> int`.
"""

import argparse

from v4flash.cli import expert_profile

NAME = "experts"
HELP = "count which experts texts choose"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in (expert_profile,):
        own = actions.add_parser(action.NAME, help=action.HELP, description=action.HELP)
        action.add_arguments(own)
        own.set_defaults(act=action.run)


def run(options: argparse.Namespace) -> int:
    """Runs the chosen action."""
    return options.act(options)
