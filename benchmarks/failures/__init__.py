"""Parts of benchmarks/detection.py: failures brought about for real, and what is told of them how soon.

`rows` lists the failures, those of ranks and those of others; `runs` and `meetings` bring them about in a `scene`,
some by the control groups of `confinement`; `in_ranks` and `in_functions` are what the processes of a scene run, and
write into its `diary`; `observation` says what came of a round, and `leftovers` what is left after it.
"""
