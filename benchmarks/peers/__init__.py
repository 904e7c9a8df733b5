"""What beside_peers.py compares: systems, each a pair of ranks in its own environment.

The controller's side: contenders.py (names), collectives.py and workloads.py (what is timed), systems.py (how a pair is
installed, started and asked), blocks.py (who measures when), rows.py and targets.py (the results).
The ranks' side, which but for over_gradsync.py does not import gradsync: rank.py, operation.py, workload.py,
and over_gradsync.py (with callback_settings.py), over_gloo.py or over_mpi.py.
"""
