"""A checkpoint as a subject (interface; the container readers fill it)."""
