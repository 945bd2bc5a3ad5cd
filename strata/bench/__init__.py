"""Speed, measured: fixed workloads, every contender in one process and one run, medians of interleaved rounds.

`setup.py` says what is measured, `workloads.py` on what, `contenders.py` who, `report.py` how it is told. A
benchmark is a command that prints numbers; no test asserts one.
"""
