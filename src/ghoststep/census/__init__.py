"""The fleet census: many checkpoints in one table, reading only their headers, config and embedding tables.

`arguments` turns what the user wrote into subjects, `survey` one subject into one small `Record`, `run` does so for all of
them, `spool` keeps finished ones in a file, `totals` adds up distinct tables by wiring class, `writers` and `terminal` show it.
"""
