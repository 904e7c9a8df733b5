"""A small transformer that learns to write like Python's own documentation, letter by letter. NumPy and gradsync only.

    gradsync run -n 2 examples/transformer.py
    gradsync run -n 2 examples/transformer.py --steps 2000

The text is the output of `help("lists")` and similar calls, a part of Python. Each layer is a function. It returns its
output, and a function that computes the gradients of its inputs. The backward pass calls these functions in reverse
order, and hands over each gradient.
"""

import argparse
from pydoc_data.topics import topics

import numpy as np

import gradsync as gs

LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 2, 64, 4, 48, 16

# -- Layers: (output, from the output's gradient to the input's) ----------------------------------------------------


def linear(x, weight):
    def back(delta):
        return delta @ weight.T, x.reshape(-1, x.shape[-1]).T @ delta.reshape(-1, delta.shape[-1])

    return x @ weight, back  # which returns the weight's gradient too


def norm(x):
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)
    y = x * scale
    return y, lambda delta: scale * (delta - y * np.mean(delta * y, axis=-1, keepdims=True))


def relu(x):
    return np.maximum(x, 0), lambda delta: delta * (x > 0)


def softmax(x):
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    y = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return y, lambda delta: y * (delta - np.sum(delta * y, axis=-1, keepdims=True))


def attend(qkv):
    """Attention: each letter uses the letters before it."""
    batch, length, _ = qkv.shape
    q, k, v = qkv.reshape(batch, length, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
    scale = q.shape[-1] ** -0.5
    future = np.triu(np.full((length, length), -1e9, qkv.dtype), 1)
    weights, back_softmax = softmax(q @ k.swapaxes(-1, -2) * scale + future)

    def back(delta):
        delta = delta.reshape(batch, length, HEADS, -1).transpose(0, 2, 1, 3)
        scores = back_softmax(delta @ v.swapaxes(-1, -2)) * scale
        deltas = np.stack([scores @ k, scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ delta])
        return deltas.transpose(1, 3, 0, 2, 4).reshape(qkv.shape)

    return (weights @ v).transpose(0, 2, 1, 3).reshape(batch, length, -1), back


# -- The model ------------------------------------------------------------------------------------------------------


def make_parameters(rng):
    def random(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    parameters = {"letters": random(WIDTH, len(LETTERS)).T.copy(), "places": random(WIDTH, CONTEXT).T.copy()}
    for layer in range(LAYERS):
        shapes = {
            "qkv": (WIDTH, 3 * WIDTH),
            "mix": (WIDTH, WIDTH),
            "up": (WIDTH, 4 * WIDTH),
            "down": (4 * WIDTH, WIDTH),
        }
        parameters |= {f"{layer}.{name}": random(*shape) for name, shape in shapes.items()}
    return parameters


def forward(p, text):
    """Returns the loss of guessing the next letter, and a function that yields (name, gradient), in backward order."""
    tokens, wanted = text[:, :-1], text[:, 1:]
    x = p["letters"][tokens] + p["places"][: tokens.shape[1]]
    way_back = []
    for layer in range(LAYERS):
        for inner, outer, between in (("qkv", "mix", attend), ("up", "down", relu)):
            y, back_norm = norm(x)
            y, back_inner = linear(y, p[f"{layer}.{inner}"])
            y, back_between = between(y)
            y, back_outer = linear(y, p[f"{layer}.{outer}"])
            x = x + y
            way_back.append((f"{layer}.{inner}", f"{layer}.{outer}", back_norm, back_inner, back_between, back_outer))
    x, back_last_norm = norm(x)
    logits, back_logits = linear(x, p["letters"].T)
    guesses, _ = softmax(logits)
    at_wanted = (*np.indices(wanted.shape), wanted)
    loss = -np.mean(np.log(guesses[at_wanted] + 1e-9))

    def backward():
        delta = guesses.copy()
        delta[at_wanted] -= 1
        delta, of_logits = back_logits(delta / wanted.size)
        delta = back_last_norm(delta)
        for inner, outer, back_norm, back_inner, back_between, back_outer in reversed(way_back):
            branch, gradient = back_outer(delta)
            yield outer, gradient
            branch, gradient = back_inner(back_between(branch))
            yield inner, gradient
            delta = delta + back_norm(branch)
        places = np.zeros_like(p["places"])
        places[: tokens.shape[1]] = delta.sum(axis=0)
        yield "places", places
        letters = of_logits.T.copy()
        np.add.at(letters, tokens, delta)
        yield "letters", letters

    return loss, backward


class Adam:
    """The optimiser Adam (Kingma and Ba, 2015)."""

    def __init__(self, parameters, rate):
        self.parameters, self.rate, self.steps = parameters, rate, 0
        self.moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in parameters.items()}

    def step(self, gradients):
        self.steps += 1
        for name, gradient in gradients.items():
            first, second = self.moments[name]
            first += 0.1 * (gradient - first)
            second += 0.01 * (gradient**2 - second)
            corrected = first / (1 - 0.9**self.steps), second / (1 - 0.99**self.steps)
            self.parameters[name] -= self.rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)


def batches(rng):
    """Yields batches of text, without end; each row is CONTEXT letters of Python's documentation, and the next one."""
    numbers = {letter: number for number, letter in enumerate(LETTERS)}
    tokens = np.array([numbers[letter] for letter in "".join(topics.values()) if letter in numbers])
    while True:
        begins = rng.integers(0, len(tokens) - CONTEXT, (BATCH, 1))
        yield tokens[begins + np.arange(CONTEXT + 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    with gs.init_process_group() as comm:
        rng = np.random.default_rng(comm.rank)  # each rank reads other parts of the text
        parameters = make_parameters(rng)
        gs.bcast_list_(list(parameters.values()), root=0)
        sync, optimizer = gs.AllreduceCallback("mean", clip_norm=1.0), Adam(parameters, rate=3e-3)
        for step, batch in zip(range(steps + 1), batches(rng), strict=False):
            loss, backward = forward(parameters, batch)
            with sync.backward():
                for name, gradient in backward():
                    sync(name, gradient)
            optimizer.step(sync.results())
            if step % (steps // 5 or 1) == 0:
                loss = gs.average_gradients(loss)  # any number
                if comm.rank == 0:
                    print(f"step {step}: loss {loss:.2f}", flush=True)


if __name__ == "__main__":
    main()
