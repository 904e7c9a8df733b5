"""The communicator of CPU clusters: NumPy arrays over MPI, through mpi4py's buffer calls.

Data goes over MPI. The ranks learn from the rendezvous server which ranks are alive and what has failed. They share the
server's address over MPI. The main files, from top to bottom: mpi_backend, mpi_reduction, waiting, mpi_job.
"""
