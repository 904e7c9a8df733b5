"""`gradsync doctor`: whether this machine can run each backend, and what to do where it cannot.

surroundings.py says what there is to look at, and probes.py asks libraries in processes of their own, for what is
broken may crash or hang; checks/ judges, from these facts alone; trials.py runs a real all-reduce of each backend;
screen.py shows all of it; command.py is the way from options to exit code.
"""
