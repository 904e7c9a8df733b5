"""What rendezvous_scale.py lets a server take: many ranks, simulated by a few processes.

run.py lets one server and its ranks through one run: the server in a process of its own (serve_gradsync.py,
serve_tcpstore.py), all ranks in two others (load.py with crowd.py, gradsync_rank.py and tcpstore_rank.py;
load_tcpstore.py has TCPStore's own clients, and runs, like serve_tcpstore.py, where nothing of gradsync is installed).
"""
