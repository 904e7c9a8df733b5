"""The communicator of CPU clusters: NumPy arrays over MPI, through mpi4py's buffer calls.

The ranks send data over MPI. From the rendezvous server they learn which ranks are alive and which have failed. Rank 0
sends the server's address over MPI. The main files, from top to bottom: mpi_backend, mpi_reduction, waiting, mpi_job.
"""
