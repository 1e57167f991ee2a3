"""Published tensor names and the module paths they belong to.

Knows: the naming convention of both families, in both directions. Does not know: shapes, number types, or
which of these tensors a given configuration has.

The modules' attribute paths follow the published names; what differs is listed here:

    backbone.layers.3.attn.wq_a.weight    layers.3.attn.wq_a.weight
    drafter.stages.1.*                    mtp.1.*
    *.hc_ffn.scale                        *.hc_ffn_scale              (also hc_attn, hc_head; fn, base)
    *.experts.w1.weight[e]                *.experts.{e}.w1.weight     (routed experts are stacked)
    backbone.embed, backbone.head         embed.weight, head.weight
    *.confidence.weight                   *.confidence_head.proj.weight
    *.markov_head.embed, .head            *.markov_head.markov_w1.weight, .markov_w2.weight (V4)
                                          *.markov_head.embed.weight, .head.weight (V4.1)

Source: the tensor names of the published checkpoints.
"""

import re

from v4flash.config import V4, V41

ModulePath = tuple[str | int, ...]
_HYPER = re.compile(r"(hc_attn|hc_ffn|hc_head)_(fn|base|scale)")
_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(.*)")
_MARKOV = {V4: {"embed": "markov_w1", "head": "markov_w2"}, V41: {"embed": "embed", "head": "head"}}
_EXPERT_SLOT = "{}"


def name_template(path: ModulePath, family: str) -> str:
    """The published name of a parameter; for stacked experts, with `{}` in place of the expert's number."""
    room, *rest = path
    parts = [str(part) for part in rest]
    if room == "drafter":
        parts[0] = "mtp"
    if parts[-2:-1] and parts[-2] in ("hc_attn", "hc_ffn", "hc_head"):
        parts[-2:] = ["_".join(parts[-2:])]
    elif parts[-2:-1] == ["markov_head"]:
        parts[-1:] = [_MARKOV[family][parts[-1]], "weight"]
    elif parts[-2:-1] == ["confidence"]:
        parts[-2:] = ["confidence_head", "proj", parts[-1]]
    elif parts in (["embed"], ["head"]):
        parts.append("weight")
    elif "experts" in parts:
        parts.insert(parts.index("experts") + 1, _EXPERT_SLOT)
    return ".".join(parts)


def is_stacked(path: ModulePath) -> bool:
    """Whether a parameter stacks one published tensor per routed expert on its leading axis."""
    return "experts" in path


def published_names(path: ModulePath, family: str, experts: int) -> tuple[str, ...]:
    """Every published tensor of a parameter: one, or `experts` of them in order for stacked experts."""
    template = name_template(path, family)
    if not is_stacked(path):
        return (template,)
    before, after = template.split(_EXPERT_SLOT)
    return tuple(f"{before}{expert}{after}" for expert in range(experts))


def parameter_of(name: str, family: str) -> tuple[ModulePath, int | None]:
    """The module path a published name would have, and the expert's number (the inverse mapping)."""
    expert = None
    if found := _EXPERT.fullmatch(name):
        name, expert = f"{found[1]}.{found[3]}", int(found[2])
    parts = name.split(".")
    if hyper := _HYPER.fullmatch(parts[-1]):
        parts[-1:] = [hyper[1], hyper[2]]
    elif parts[-3:-1] == ["confidence_head", "proj"]:
        parts[-3:-1] = ["confidence"]
    elif parts[-3:-2] == ["markov_head"]:
        module = {published: own for own, published in _MARKOV[family].items()}
        parts[-2:] = [module.get(parts[-2], parts[-2])]
    elif parts in (["embed", "weight"], ["head", "weight"]):
        parts.pop()
    if parts[0] == "mtp":
        parts[:1] = ["drafter", "stages"]
    else:
        parts.insert(0, "backbone")
    return tuple(int(part) if part.isdigit() else part for part in parts), expert
