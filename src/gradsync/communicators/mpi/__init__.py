"""The backend for CPU clusters: NumPy arrays over MPI, through mpi4py's buffer calls.

The ranks send data over MPI. The rendezvous server reports failed ranks to the other ranks. If the user has not set the
server's address, rank 0 sends the address over MPI. The files, from the highest layer to the lowest: mpi_backend,
mpi_reduction, mpi_requests, mpi_job.
"""
