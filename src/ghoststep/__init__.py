"""ghoststep finds, proves, explains, prevents and repairs silent failures of language-model training."""

__version__ = "0.1.0"
