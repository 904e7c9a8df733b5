"""Parts of benchmarks/failure_detection.py: real failures, and their reports.

`rows` lists the failures, those of ranks and those of others; `runs` and `meetings` cause them in a `scene`, some by
the control groups of `confinement`; `in_ranks` and `in_functions` are what the processes of a scene run, and write into
its `diary`; `observation` checks a round, and `leftovers` finds what it has left behind.
"""
