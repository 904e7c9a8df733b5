"""The backend for CPU clusters: NumPy arrays over MPI, through mpi4py's buffer calls. The ranks send data over MPI. The
rendezvous server reports to the ranks which ranks are alive and which have failed. Rank 0 sends the server's address
over MPI. The main files, from the highest layer to the lowest: mpi_backend, mpi_reduction, waiting, mpi_job.
"""
