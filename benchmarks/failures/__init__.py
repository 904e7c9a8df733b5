"""Parts of benchmarks/detection.py and fault_matrix.py: failures brought about for real, and what is told of them.

`rows` lists the failures, those of ranks and those of others, and `matrix` each fault at each point of a run's life, by
the names in `points`; `runs` and `meetings` bring them about in a `scene`, some by the control groups of `confinement`;
`in_ranks`, `in_functions` and `in_phases` are what the processes of a scene run, and write into its `diary`;
`observation` says what came of a round, and `leftovers` what is left after it.
"""
