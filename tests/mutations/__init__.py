"""Planted faults: known training bugs, put into many small architectures the way a user's code would have them.

    python -m tests.mutations.score                     the whole table (benchmarks/mutation_table.md)
    python -m tests.mutations.score --fault no_causal   one fault on every architecture
    python -m tests.mutations.score --arch gpt2         every fault on one architecture

- `architectures`: tiny models on CPU (at most 64 features, 2 layers, 20 tokens, 4 examples), random but seeded, each with its own
  batch, loss and way of being called: Hugging Face decoders, state-space models, hybrids, mixtures of experts, encoders,
  encoder-decoders, adapters, plain modules that return a tensor, a tuple or a dict, and sentence encoders.
- `faults` collects all faults: each one changes model, batch, loss or training step (never a flag that a checker reads) and names the
  code that has to be reported *as the first error*; another code first is a miss.
- `harm` measures, without any instrument of ghoststep, that the fault hurts: logits that move when they must not, a gradient that
  points elsewhere, weights that do not move. A cell below the fault's bound is "harmless" and leaves the score: found / harmful.
- The healthy twin of the same class has to stay silent (no error, no warning) in the same run.
- `--variant eval|bf16|fast` runs the families that it concerns in eval mode, in bfloat16, or with `fast=True`.

Nothing here reads how ghoststep measures: faults are judged from the outside, through `ghoststep.check(**setup)`.
"""
