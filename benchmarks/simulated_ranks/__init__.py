"""The load of rendezvous_scale.py: many ranks, simulated by a few processes.

run.py runs one server with its ranks: the server in a process of its own (serve_gradsync.py; serve_tcpstore.py, which
runs where nothing of gradsync is installed), all ranks in two others (load.py with crowd.py, gradsync_rank.py and
tcpstore_rank.py).
"""
