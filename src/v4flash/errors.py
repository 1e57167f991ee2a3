"""The errors a person may meet: one sentence each, with the exit code the command line returns.

Knows: the kinds of failure and their exit codes. Does not know: how they are printed (cli) or who raises them.
"""


class V4FlashError(Exception):
    """A failure with a sentence for the user: what, where, expected, found, what to do next."""

    exit_code = 1


class UsageError(V4FlashError):
    """Options or inputs that cannot be honoured (exit code 2)."""

    exit_code = 2


class CheckpointError(V4FlashError):
    """A checkpoint that is missing, damaged, or of an unknown kind (exit code 3)."""

    exit_code = 3


class CapacityError(V4FlashError):
    """Something that does not fit the device or the planned context (exit code 4)."""

    exit_code = 4


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type's name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
