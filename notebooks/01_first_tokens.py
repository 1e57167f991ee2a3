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
# # First tokens
#
# This notebook loads the small demonstration model, lets it write, and looks at what a speculative decoder
# does in a single step. It runs on a CPU in about a minute; the first time, half of that goes into
# compiling, and the compiled programs are kept for the next time.
#
# The model has the mechanisms of DeepSeek-V4.1-Flash with about 25 million parameters. It has read Python's
# source and documentation, some plays and some novels, and knows parts of them by heart. Judge the decoder,
# not the answers.

# %%
import matplotlib.pyplot as plt

import v4flash

model = v4flash.load(v4flash.demo_path(), context=1024)
print(f"{model.config.family}, {model.mode} arithmetic, up to {model.draft_limit} drafts in a step")

# %% [markdown]
# ## Writing
#
# `generate` returns an iterator. Each record is one step: the text that became final with it, and how it
# came about. Here a faint bar marks the end of every step, so that you can see how many tokens arrive at
# once.

# %%
PROMPT = 'def read_lines(path):\n    """Return the lines of a text file without their line ends."""\n'


def write(generation, mark="\u2506"):
    """Prints a generation while it comes, step by step."""
    for record in generation:
        print(record.text, end=mark, flush=True)
    print()


print(PROMPT, end="")
generation = model.generate(PROMPT, raw=True, max_tokens=80)
write(generation)

# %%
figures = generation.statistics
print(f"{figures.generated} tokens in {figures.steps} steps: {figures.tokens_per_step:.2f} tokens per step")
print(f"{figures.step_milliseconds:.1f} ms per step, {figures.decode_rate:.0f} tokens per second")

# %% [markdown]
# With `raw=True` the text is simply continued. Without it, it is a message in a conversation, framed as the
# checkpoint expects it.

# %%
write(model.generate("What does the function os.path.join do?", max_tokens=60), mark="")

# %% [markdown]
# ## One step, taken apart
#
# A step starts at the *anchor*, the newest token. The drafter guesses the tokens behind it. The model then
# reads anchor and guesses together in **one** pass, which costs hardly more than reading one token. Guesses
# are accepted from the left while they agree with what the model itself would say; the first one that does
# not is replaced by the model's own token. Whatever is accepted, the text is the text of the model alone.

# %%
records = list(model.generate(PROMPT, raw=True, max_tokens=80))
# The first record is the token that reading the prompt gave. Pick a step that refused something, if there is one.
step = next((record for record in records[1:] if 0 < record.accepted < len(record.drafts)), records[1])


def shown(token):
    return repr(model.tokenizer.decode([token]))


print(f"the step that begins at position {step.position}")
print(f"{'row':>3}  {'drafted':<16}{'confidence':>10}  {'verdict':<10}{'committed':<16}")
for row, draft in enumerate(step.drafts):
    verdict = "accepted" if row < step.accepted else "refused" if row == step.accepted else "not read"
    committed = shown(step.tokens[row]) if row < len(step.tokens) else ""
    print(f"{row + 1:>3}  {shown(draft):<16}{step.confidence[row]:>10.2f}  {verdict:<10}{committed:<16}")
if len(step.tokens) > len(step.drafts):
    print(f"{len(step.tokens):>3}  {'':<16}{'':>10}  {'':<10}{shown(step.tokens[-1]):<16}")
print(f"{step.accepted} of {len(step.drafts)} drafts accepted, {len(step.tokens)} tokens committed")

# %% [markdown]
# The last committed token is always the model's own: either in place of the first refused draft, or on top
# when all were accepted. Without any drafts (`k=0`) the same text comes one token at a time:

# %%
plain = model.generate(PROMPT, raw=True, max_tokens=80, k=0)
plain_tokens = [token for record in plain for token in record.tokens]
drafted_tokens = [token for record in records for token in record.tokens]
assert plain_tokens == drafted_tokens
print(f"the same {len(plain_tokens)} tokens, in {plain.statistics.steps} steps instead of {figures.steps}")

# %% [markdown]
# ## How far do guesses get?
#
# For each position, the share of steps in which the draft there and all before it were accepted. Code is
# easier to guess than verse. The drafter was trained for blocks of five; beyond, it is on its own.

# %%
prompts = {
    "code": "class Stack:\n    def __init__(self):\n",
    "documentation": "Return ``True`` if the object is ",
    "verse": "## ACT II\n\n### SCENE I. ",
}
figure, axes = plt.subplots(figsize=(5.5, 3), dpi=80)
for name, prompt in prompts.items():
    generation = model.generate(prompt, raw=True, max_tokens=120, k=7, ignore_eos=True)
    for _ in generation:
        pass
    share = generation.statistics.acceptance_by_position
    tokens_per_step = generation.statistics.tokens_per_step
    axes.plot(
        range(1, len(share) + 1), share, marker="o", label=f"{name}, {tokens_per_step:.1f} tokens per step"
    )
axes.axvline(model.config.draft.block_size + 0.5, color="grey", linewidth=0.8, linestyle="--")
axes.set(xlabel="draft position", ylabel="accepted with all before it", ylim=(0, 1.02))
axes.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## A session: resume, rewind, branch
#
# A session remembers what was read. Generating again continues it, without reading the beginning a second
# time. A copy is independent of its original, and rewinding is cheap: what the model keeps is addressed by
# position, so forgetting the end means lowering one number.

# %%
session = model.session()
write(model.generate(PROMPT, raw=True, max_tokens=30, session=session, ignore_eos=True), mark="")
resumed = model.generate([], max_tokens=30, session=session, ignore_eos=True)
write(resumed, mark="")
print(
    f"\nresumed by reading {resumed.statistics.prompt_tokens} token; the session holds {len(session.tokens)}"
)

# %%
branch = session.copy()
branch.rewind(len(branch.tokens) - 40)
kept = len(branch.tokens)
other = model.generate([], max_tokens=40, session=branch, temperature=1.0, seed=5, ignore_eos=True)
write(other, mark="")
print(
    f"\nthe branch kept {kept} tokens, read {other.statistics.prompt_tokens} of them again, and went its own way"
)
assert session.tokens[:kept] == branch.tokens[:kept]
assert len(session.tokens) == kept + 40

# %% [markdown]
# ## From here
#
# - The same on the command line: `v4flash decode --raw --prompt "def read_lines(path):"`; `--help` lists the options.
# - What the demonstration model is, and how well it guesses on each kind of text: `demo/README.md`.
# - How a step works, in code: `src/v4flash/speculative/step.py` is one function, from drafting to committing.
