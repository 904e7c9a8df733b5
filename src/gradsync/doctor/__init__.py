"""`gradsync doctor`: whether this machine can run each backend, and what to do where it cannot.

facts.py collects facts about the machine. It asks libraries in processes of their own (probes.py), as a broken library
may crash or hang. checks.py turns facts into findings. command.py runs an all-reduce over each backend and prints all.
"""
