"""How the programs of one Triton kernel wait for each other.

Knows: a latch (some programs wait until others have arrived), a ticket (the last program to finish is told so),
and a barrier of all programs, each on one line of an int32 array in global memory. Does not know: what is handed
over.

    counters = device_barrier.counters(lines)           zeros, once per captured program
    kernel(..., counters) -> (..., counters)            the same array, aliased in and out of every kernel

Rules that make this work inside a captured graph that is replayed:

* A latch and a ticket leave their line at zero; a barrier flips the sign bit of its line each time and leaves the
  other bits at zero. Nothing has to be reset between launches or replays, and kernels that follow one another may
  use the same lines whatever their grids are. Two things in one kernel need two lines.
* Writes before `arrive`, `is_last` or `barrier` are visible behind `wait`, a true `is_last` or `barrier`: every
  thread's stores precede the program's one atomic (release, GPU scope) because of the block barrier before it, and
  every load of the other side follows an acquire. Data handed over must not be read through the non-coherent path.
* Waiting programs must not keep the awaited ones from running. With `wait` this holds on any GPU if programs
  only wait for programs with smaller numbers, because those are started first. `barrier` needs every program
  resident at once: grid <= processors times programs per processor, and nothing else on the GPU that never ends.
* A wait gives up after `MOST_POLLS` polls (a few seconds). Results are then wrong, but the GPU does not hang.

In Triton's interpreter programs run one after another, in the order of their numbers, and nobody waits. Latches to
smaller numbers and tickets work there as they are; a kernel with a barrier runs its phases as an outer grid axis.

The counting is that of CUDA's cooperative groups (a barrier that flips a sign bit), in our own words.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import launch

LINE_WORDS = 32  # 128 bytes: a line is polled without disturbing its neighbours
LINE = tl.constexpr(LINE_WORDS)
MOST_POLLS = tl.constexpr(1 << 22)
INTERPRETED = tl.constexpr(launch.INTERPRETED)


def counters(lines: int) -> jax.Array:
    """Counters int32 [lines * LINE_WORDS] for kernels that use up to `lines` lines, all zero."""
    return jnp.zeros((lines * LINE_WORDS,), jnp.int32)


# One thread polls; the others stand at the block barrier behind it. Polls of all threads of all waiting programs
# would queue up in front of the arrivals they wait for. $0: the value seen, $1: the word, $2: the most polls.
_POLLS = """{
.reg .pred again;
.reg .b32 thread, polls, compared;
mov.b32 $0, 0;
mov.b32 polls, 0;
mov.u32 thread, %tid.x;
setp.ne.u32 again, thread, 0;
@again bra done;
poll:
ld.acquire.gpu.global.b32 $0, [$1];
add.s32 polls, polls, 1;
COMPARE
setp.lt.and.s32 again, polls, $2, again;
@again bra poll;
done:
}"""
_UNTIL_REACHED = tl.constexpr(_POLLS.replace("COMPARE", "setp.lt.s32 again, $0, $3;"))
_UNTIL_FLIPPED = tl.constexpr(
    _POLLS.replace("COMPARE", "xor.b32 compared, $0, $3;\nsetp.ge.s32 again, compared, 0;")
)
# $0: who left before, $1: the line's second word. Only one thread counts.
_COUNT_OUT = tl.constexpr("""{
.reg .pred one;
.reg .b32 thread;
mov.b32 $0, 0;
mov.u32 thread, %tid.x;
setp.eq.u32 one, thread, 0;
@one atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
}""")
# $1: the line's second word, $2: who left before, $3: the number of the last to leave; $0 means nothing.
_CLEAR = tl.constexpr("""{
.reg .pred one, last;
.reg .b32 thread;
mov.b32 $0, 0;
mov.u32 thread, %tid.x;
setp.eq.u32 one, thread, 0;
setp.eq.and.u32 last, $2, $3, one;
@last st.relaxed.gpu.global.b32 [$1], 0;
@last st.relaxed.gpu.global.b32 [$1+-4], 0;
}""")


@triton.jit
def arrive(counters, line: tl.constexpr):
    """Says that this program's writes are done; `wait` counts these calls."""
    tl.debug_barrier()
    tl.atomic_add(counters + line * LINE, 1, sem="release", scope="gpu")


@triton.jit
def arrive_at(counters, line: tl.constexpr, lines: tl.constexpr):
    """`arrive` at `lines` lines (a power of two) from `line` on, for more waiters than one line should be polled by."""
    tl.debug_barrier()
    tl.atomic_add(counters + (line + tl.arange(0, lines)) * LINE, 1, sem="release", scope="gpu")


@triton.jit
def wait(counters, line: tl.constexpr, arrivals: tl.constexpr):
    """Holds this program until `arrivals` programs have arrived at the line. Returns 0, known only behind the wait.

    Added to a place, that zero keeps loads behind the wait which a compiler may move: those of pure assembly.
    """
    if INTERPRETED:  # whoever is awaited has long finished
        return 0
    else:
        tl.inline_asm_elementwise(
            _UNTIL_REACHED, "=r,l,r,r", [counters + line * LINE, MOST_POLLS, arrivals], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 0;", "=r,r", [arrivals], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def leave(counters, line: tl.constexpr, waiters: tl.constexpr):
    """Ends the use of a latch: each of the `waiters` programs calls it once, after its `wait`, at its very end.

    The last to leave sets the line back to zero. It comes last because its atomic takes a trip through memory
    that nothing needs to wait for; nothing is handed over with it. Many waiters in several waves had better use its
    two halves, `count_out` right behind the wait and `clear` at the end: their places are free one trip earlier.
    """
    clear(counters, line, waiters, count_out(counters, line))


@triton.jit
def count_out(counters, line: tl.constexpr):
    """Says that this program has waited; returns what `clear` needs to know."""
    word = counters + line * LINE + 1
    if INTERPRETED:
        return tl.atomic_add(word, 1)
    else:
        return tl.inline_asm_elementwise(_COUNT_OUT, "=r,l", [word], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def clear(counters, line: tl.constexpr, waiters, before):
    """Sets the line back to zero in the program that was the last of `waiters` to count itself out."""
    word = counters + line * LINE + 1
    if INTERPRETED:
        if before == waiters - 1:
            tl.store(word - 1, 0)
            tl.store(word, 0)
    else:
        tl.inline_asm_elementwise(
            _CLEAR, "=r,l,r,r", [word, before, waiters - 1], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def is_last(counters, line: tl.constexpr, programs):
    """True in the last of `programs` programs to call this; that one sees the writes of all the others."""
    tl.debug_barrier()
    before = tl.atomic_add(counters + line * LINE, 1, sem="acq_rel", scope="gpu")
    last = before == programs - 1
    if last:
        tl.store(counters + line * LINE, 0)
    tl.debug_barrier()
    return last


@triton.jit
def barrier(counters, line: tl.constexpr, program, programs: tl.constexpr):
    """Holds every one of `programs` programs until all have come; `program` is this one's number.

    Program 0 adds 2^31 - (programs - 1) and the others 1, so that exactly the last arrival flips the sign bit.
    """
    tl.debug_barrier()
    if programs > 1:
        word = counters + line * LINE
        step = tl.where(program == 0, 2147483648 - (programs - 1), 1)
        before = tl.atomic_add(word, step, sem="acq_rel", scope="gpu")
        if not INTERPRETED:
            tl.inline_asm_elementwise(
                _UNTIL_FLIPPED, "=r,l,r,r", [word, MOST_POLLS, before], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.debug_barrier()
