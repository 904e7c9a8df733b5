"""`gradsync doctor`: reports whether this machine can run each backend, and how to solve the problems.

facts.py collects facts about the machine. checks.py turns these facts into findings. command.py runs an all-reduce with
each backend (trial.py) and prints the report.
"""
