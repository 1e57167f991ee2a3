"""`v4flash kernels ACTION`: the hand-fused operations and what a step launches.

Knows: the list of actions. Does not know: what they do; each has a name, a help text, `add_arguments(parser)` and
`run(options) -> int`.
"""

import argparse

from v4flash.cli import kernel_budget, kernel_cases, kernel_gate, kernel_tuning

NAME = "kernels"
HELP = "list, check, time and tune the hand-fused operations; count what one step launches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in (*kernel_cases.ACTIONS, kernel_gate, kernel_tuning, kernel_budget):
        own = actions.add_parser(action.NAME, help=action.HELP, description=action.HELP)
        action.add_arguments(own)
        own.set_defaults(act=action.run)


def run(options: argparse.Namespace) -> int:
    """Runs the chosen action."""
    return options.act(options)
