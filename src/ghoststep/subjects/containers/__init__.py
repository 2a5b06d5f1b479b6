"""Readers of weight files: one module a container, all over `Source.read`, so that a folder and a Hub revision read alike.

Each reader parses its header itself, within bounds that the file cannot set: sizes, counts and offsets are compared with the
size of the file before anything is allocated. No pickle is ever executed and no file is imported.
"""
