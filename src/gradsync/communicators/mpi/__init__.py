"""The backend for CPU clusters: NumPy arrays over MPI, through mpi4py.

backend.py has the collectives, requests.py waits for them and moves messages, job.py is about the process
in its MPI job.
"""
