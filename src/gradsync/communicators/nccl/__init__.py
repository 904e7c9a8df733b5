"""The backend between GPUs: CuPy arrays over NCCL.

Code outside this folder imports only the modules `connect` and `library`.
"""
