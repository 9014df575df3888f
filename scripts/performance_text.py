"""What docs/performance.md says around its tables."""

BEFORE = """\
# Performance, modelled

Written by `make performance`; do not edit. Every figure here is **modelled**: exact counts of the emulator, times the rates of
[speed_rates.py](../mla_rt/speed_rates.py) for an MI355X. **Nothing was measured on a card.** Of this code object: `mla_decode.co`, sha256
`{hash}…`; AITER's kernels are those of its wheel {wheel}, and the newer FP8 kernel of its repository.

- **≥**, the lower bound: everything overlaps; a compute unit takes as long as its busiest resource, and the launch at least as long as its memory
  lines at the peak rate.
- **≤**, the upper bound: nothing overlaps in a wave; every wait lasts a whole round trip, and memory comes at each compute unit's share.
- Launches are included, 4.5 µs each. A ratio is ours over AITER's: below 1 ours is faster.

AITER is given every advantage: its best number of splits (1 to 32 of the plain kernel, or a work list with one work a compute unit), found for each
bound alone; nothing for making its work list and for bringing q to FP8, which its kernels want (ours take bf16). Its merge of the splits, which is
another launch, costs 4.5 µs and its bytes at the peak rate, even in the upper bound. Its error is 1.4e-2 to 2e-2 in FP8, where q and the softmax
weights are rounded to FP8; ours is that of rounding the exact result to bf16, about 2e-3.
"""

AFTER = """\
## Where our time goes

Of the busiest compute unit by resource, in the lower bound, and what the upper bound adds up (of the workgroups that end last), µs, modelled.
`latency`: round trips of all waits; `neighbours`: what workgroups on one compute unit wait for each other; `memory`: the workgroup's own lines.
"""

REPRODUCE = """\
## How to reproduce
`make performance` writes this page. One shape, with all its counts, for a terminal, as JSON or as a page with pictures:

```sh
.venv/bin/mla-rt speed --batch 4 --kv-len 1024 --kv-format fp8_e4m3fn --page-size 64 --html speed.html
```

AITER's kernels run in `tests/peers` (`make peers`); how they are launched and at what splits is in `aiter_mla.py` and `aiter_speed.py` there. Equal
requests do equal work, so a batch of them is counted on one or a few, whose counts are repeated; the ragged batch is emulated whole.
"""

ON_A_CARD = """\
## What a run on a card should check first
1. `.venv/bin/mla-rt probe`: whether the card does what the kernels and the emulator assume. Nothing below means anything before that holds.
2. `.venv/bin/python scripts/bench.py`: the same shapes, measured with events. A time below the lower bound refutes the counts or
   the rates; one above the upper bound shows a cost that the model does not know.
3. (256, 8192) in FP8: bytes over time is the memory rate that is reached. Public MLA kernels reach 5.96 of the 8 TB/s; the lower bounds assume 8.
4. (4, 1024): nearly all of it is the launch and the chain of waits. It tells the true cost of a launch and of a round trip (1000 clocks assumed).
5. The same shape with more splits: what the merge by the last workgroup to arrive costs, in which caches of several dies have to be written back.
6. AITER's own kernels on the same card and with the same events, before anything is called faster.
"""
