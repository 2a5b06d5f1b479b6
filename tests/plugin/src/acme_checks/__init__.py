"""Checks of ACME's own; ghoststep walks this package because its entry point names it."""
