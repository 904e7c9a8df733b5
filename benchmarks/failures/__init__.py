"""Parts of benchmarks/failure_detection.py and fault_matrix.py: real failures, and their reports.

`rows` lists the failures, those of ranks and those of others, and `matrix` each fault at each point of a run's life, by
the names in `points`; `runs` and `meetings` cause them in a `scene`, some by the control groups of `confinement`;
`in_ranks`, `in_functions` and `in_phases` are what the processes of a scene run, and write into its `diary`;
`observation` checks a round, and `leftovers` finds what it has left behind.
"""
