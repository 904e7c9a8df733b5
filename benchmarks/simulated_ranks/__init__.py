"""`gradsync bench rendezvous`: how a rendezvous server takes many ranks, beside PyTorch's TCPStore.

command.py is the way from options to output, with rows.py, report.py and picture.py. run.py lets one server and its
ranks through one run: the server in a process of its own (serve_gradsync.py, serve_tcpstore.py), all ranks in a few
(load.py with crowd.py, gradsync_rank.py and tcpstore_rank.py; load_tcpstore.py has TCPStore's own clients).
benchmarks/rendezvous_scale.py goes through the same runs, for thousands of ranks.
"""
