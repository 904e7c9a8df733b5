"""The code that runs inside a rank process: the guard, and the code that runs the user's script or function."""
