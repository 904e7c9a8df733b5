"""`gradsync doctor`: reports whether this machine can run each backend, and what to do if it cannot.

facts.py collects facts about the machine. checks.py turns these facts into findings. command.py runs an all-reduce with
each backend and prints the report.
"""
