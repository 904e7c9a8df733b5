"""Communicators run the collectives. backend.py has the interface of a backend, and each subfolder is one backend."""
