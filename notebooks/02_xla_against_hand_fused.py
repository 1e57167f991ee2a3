# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # XLA against hand-fused
#
# A step of DeepSeek-V4-Flash reads 25 billion bytes for six rows of activations. On an H200 that takes
# about six milliseconds; everything beyond is the price of launching small kernels, of waiting between them, and of
# copies. This notebook shows one layer as XLA compiles it from plain JAX, and the same layer in the launches of
# `pallas_kernels/`. Compiling needs no GPU: JAX's CUDA plugin does it here, for two GPUs that are not here. Times were
# recorded on an H200.

# %%
import collections
import json

import matplotlib.pyplot as plt

import v4flash
from v4flash.profile import floor, machines, one_layer, targets

MODEL, GPUS, BACKENDS = "v4-flash-0731", ("h200", "gb300"), ("xla", "fused")
layers = {(gpu, backend): one_layer.layer(MODEL, gpu, backend) for gpu in GPUS for backend in BACKENDS}

# %% [markdown]
# ## What one layer launches
#
# The layer has compressed attention at ratio 4 with an indexer, and a mixture of experts. Weights stay in their
# published FP8 and FP4 bytes; `copied` counts bytes that a program moves or decodes in memory before it uses them, on
# every step.

# %%
print(f"{'GPU':<7}{'backend':<9}{'attention':>10}{'experts':>9}{'copied MB':>11}")
for (gpu, backend), layer in layers.items():
    print(
        f"{gpu:<7}{backend:<9}{layer.launches('attention'):>10}{layer.launches('ffn'):>9}"
        f"{layer.copied_weights / 1e6:>11,.0f}"
    )

# %% [markdown]
# The hand-fused layer, launch by launch:

# %%
for scope, name in layers["h200", "fused"].kernels:
    if scope:
        print(f"{scope:<11}{name}")

# %% [markdown]
# And XLA's, by the kind of kernel. Names ending in a number were made for one place of the program only.

# %%
kinds = collections.Counter(name.split(".")[0] for scope, name in layers["h200", "xla"].kernels if scope)
for name, count in kinds.most_common(12):
    print(f"{count:>4}  {name}")

# %% [markdown]
# A few lines of the optimised program in front of the first expert product, by XLA and by hand:

# %%
for backend in BACKENDS:
    lines = [
        line.strip()
        for line in layers["h200", backend].hlo.splitlines()
        if "metadata" in line and "ffn" in line
    ]
    print(f"{backend}: {len(lines)} instructions in the mixture of experts; the last two:")
    for line in lines[-2:]:
        print("   ", line.split(", metadata")[0][:150])

# %% [markdown]
# ## Bytes
#
# What a step must read at least, by part of the model, with 25 different experts a layer:

# %%
config = v4flash.ModelConfig.from_file(targets.folder().parent / "models" / f"{MODEL}.json")
least = floor.floor(config, 5, 2048, floor.CORRELATED)
parts = [part for part in least.parts if part.bytes > 0.004 * least.bytes]
figure, axes = plt.subplots(figsize=(7, 3))
axes.barh([part.name for part in parts][::-1], [part.bytes / 1e9 for part in parts][::-1], color="#4878a8")
axes.set_xlabel("GB per step (modelled routing)")
axes.set_title(f"{MODEL}, k = 5: {least.bytes / 1e9:.1f} GB")
figure.tight_layout()

# %% [markdown]
# ## Time
#
# Recorded on an H200 by `v4flash bench --random-weights`: the whole hand-fused step, 43 layers and the drafter,
# kernel by kernel ([how, and what it leaves out](../docs/measurements/2026-11-30-h200-native-launches.md)).
# The floor is the time of the bytes above with the experts that were counted, at 4.3 TB/s. Plain XLA, in another
# run, had 5,168 kernels that took 97 ms, and a step 133 ms.

# %%
FOLDER = targets.folder().parents[1] / "docs" / "measurements"
record = json.loads((FOLDER / "2026-11-30-h200-step-v4-flash-native.json").read_text())
BANDWIDTH = machines.machine("h200").memories[0].bandwidth.value
greedy = [cell for cell in record["cells"] if cell["temperature"] == 0]
print(f"{record['device']['kind']}, {record['experts_resident']} of {record['experts']} experts resident")
print(
    f"{'k':>3}{'context':>9}{'experts':>9}{'kernels':>9}{'in kernels':>12}{'step':>12}{'floor':>10}{'ratio':>7}"
)
for cell in sorted(greedy, key=lambda cell: cell["k"]):
    spent, ideal = cell["profile"]["kernel_microseconds"] / 1e3, cell["floor_bytes"] / BANDWIDTH * 1e3
    print(
        f"{cell['k']:>3}{cell['context']:>9,}{cell['experts_per_layer']['mean']:>9.1f}"
        f"{cell['profile']['kernels_per_step']:>9,.0f}{spent:>9.2f} ms{cell['milliseconds']:>9.2f} ms"
        f"{ideal:>7.2f} ms{cell['milliseconds'] / ideal:>7.2f}"
    )

# %% [markdown]
# Where the time of a step with five drafts goes by the length of a kernel. Nine tenths of the bytes are read by the
# long ones; the short ones leave the memory idle, and each also costs a gap of about a microsecond that is not in
# this figure.

# %%
cell = next(cell for cell in greedy if (cell["k"], cell["context"]) == (5, 2048))
buckets = cell["profile"]["buckets"]
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
for axis, index, unit, title in (
    (axes[0], 0, 1, "kernels per step"),
    (axes[1], 1, 1e3, "milliseconds per step"),
):
    axis.bar(range(len(buckets)), [bucket[index] / unit for bucket in buckets.values()], color="#4878a8")
    axis.set_xticks(range(len(buckets)), [f"{name} us" for name in buckets])
    axis.set_title(title)
figure.tight_layout()

# %% [markdown]
# The longest kernels, and the share of the copy bandwidth that each stream of weights reaches:

# %%
print(f"{'us/step':>9}{'times':>7}{'mean us':>9}  kernel")
for kernel in cell["profile"]["kernels"][:12]:
    print(
        f"{kernel['microseconds']:>9,.0f}{kernel['per_step']:>7.0f}{kernel['mean']:>9.1f}  {kernel['name']}"
    )
print()
for name, stream in cell["streams"].items():
    print(f"{name:<14}{stream['rate'] / 1e12:>6.2f} TB/s{100 * stream['rate'] / BANDWIDTH:>6.0f} %")
