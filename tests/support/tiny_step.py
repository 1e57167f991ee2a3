"""A V4-shaped configuration of two layers, small enough to compile for a GPU in seconds."""

from toy_models import toy_json

LAYERS = 2


def tiny_json(*, drafter: bool) -> dict:
    """Published-style configuration: one overlapped and one sparse layer, with one draft stage or none."""
    raw = toy_json("v4") | dict(num_hidden_layers=LAYERS, compress_ratios=[4, 128, 0], num_hash_layers=1)
    if drafter:
        return raw | dict(dspark_target_layer_ids=[1])
    raw = {name: value for name, value in raw.items() if not name.startswith("dspark")}
    return raw | dict(compress_ratios=[4, 128])
