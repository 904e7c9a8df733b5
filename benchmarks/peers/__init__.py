"""The systems that full_speed.py and collectives.py compare, each a pair of ranks in an environment of its own.

The controller's side: comparison.py (the command), contenders.py (names), collectives.py and workloads.py (what is
timed), systems.py (how a pair is installed and started), pair.py (talks to one), blocks.py (who measures when),
rows.py, targets.py and tables.py (what came out of it).
The ranks' side, which but for over_gradsync.py imports neither gradsync nor rich: rank.py, operation.py, workload.py,
and over_gradsync.py, over_gloo.py or over_mpi.py.
"""
