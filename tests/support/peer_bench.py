"""The record of a small step timed on two devices; run apart, for it needs them. Prints JSON."""

import json

from packed_toys import SMALL
from toy_models import with_table_sizes

from v4flash.bench import real_step
from v4flash.config import ModelConfig
from v4flash.model.fused.bodies import ReferenceBodies

RESIDENT = 6


def main() -> None:
    """Times it on the operations' definitions, for there is no GPU."""
    real_step.PeerProgram.bodies = ReferenceBodies
    config = ModelConfig.from_dict(with_table_sizes(SMALL["v41"]))
    request = real_step.Request(
        config, draft_lengths=(2,), contexts=(64,), resident=RESIDENT, peer=True, steps=2, repeats=2,
        profile=False,
    )  # fmt: skip
    print(json.dumps(real_step.run(request)))


if __name__ == "__main__":
    main()
