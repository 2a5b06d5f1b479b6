"""Looking at many things at once: fleets of checkpoints here, whole corpora later."""
