"""What runs inside a rank process, beside its guard and around the user's code."""
