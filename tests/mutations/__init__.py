"""Planted faults: known training bugs, put into many small architectures the way a user's code would have them.

    python -m tests.mutations.score                     the whole table (benchmarks/mutation_table.md)
    python -m tests.mutations.score --fault no_causal   one fault on every architecture
    python -m tests.mutations.score --arch gpt2         every fault on one architecture
    python -m tests.mutations.score --harm-only         proves the harm of each and runs no check

- `architectures`: tiny models on CPU (dim <= 64, 2 layers, at most 24 tokens, batch of 4), random but seeded, each with its own batch, loss
  and way of being called: Hugging Face decoders, state-space models, hybrids, mixtures of experts, encoders, encoder-decoders, adapters,
  plain modules that return a tensor, a tuple or a dict, and sentence encoders.
- `faults` collects all faults: each one changes model, batch, loss or training step (never a flag that a checker reads) and names the code
  that has to be reported *as the first error*; another code first is a miss.
- `harm` measures, without any instrument of ghoststep, that the fault hurts: logits that move when they must not, a gradient that points
  elsewhere, weights that do not move. A cell below the fault's bound is "harmless" and leaves the score: the score is found / harmful.
- The healthy twin of the same class has to stay silent (no error, no warning) in the same run.

Nothing here reads how ghoststep measures: faults are judged from the outside, through `ghoststep.check(**setup)`.
"""
