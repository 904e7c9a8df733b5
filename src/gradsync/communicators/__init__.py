"""Communicators, which run the collectives. backend.py has the interface of the backends, and each folder a backend."""
