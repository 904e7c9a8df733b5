"""The systems that full_speed.py compares, each a pair of rank processes in an environment of its own.

The controller's side: contenders.py (names), workloads.py (what is timed), systems.py (how a pair is installed and
started), pair.py (talks to one), blocks.py (who measures when), rows.py and targets.py (what came out of it).
The ranks' side, which imports neither gradsync nor rich: rank.py, and over_gradsync.py, over_gloo.py or over_mpi.py.
"""
