"""What the step costs: compiled without a GPU and counted, or run on one and timed.

Knows: the compiler's reports, the profiler's files, and the bytes a step cannot avoid. Does not know: how any
part computes.
"""
