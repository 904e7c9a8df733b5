"""Tutorial: a training loop in NumPy, in one process, without gradsync."""

import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 3))
y = x @ [1.0, 2.0, 3.0] + 4.0
weights, bias = rng.normal(size=3), np.zeros(1)

for step in range(1, 101):
    error = x @ weights + bias - y
    grad_weights = 2 * error @ x / len(y)
    grad_bias = 2 * error.mean(keepdims=True)
    weights -= 0.1 * grad_weights
    bias -= 0.1 * grad_bias
    if step in (1, 10, 100):
        print(f"step {step}: weights {weights.round(4)}, bias {bias.round(4)}")
