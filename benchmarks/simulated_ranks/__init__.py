"""The load of rendezvous_scale.py: many ranks, simulated by a few processes.

run.py runs one server with its ranks: the server in a process of its own (serve_gradsync.py,
serve_tcpstore.py), all ranks in two others (load.py with crowd.py, gradsync_rank.py and tcpstore_rank.py;
load_tcpstore.py has TCPStore's own clients, and runs, like serve_tcpstore.py, where nothing of gradsync is installed).
"""
