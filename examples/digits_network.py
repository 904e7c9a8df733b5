"""A small convolutional network with its backward pass, for train_digits.py. This file does not use gradsync.

`backward` yields each gradient as soon as it exists, so that on GPUs gradsync can reduce it beside the rest of the
backward pass. The arrays belong to the module `xp`: numpy or cupy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray


class Network:
    """Two 3 x 3 convolutions, a mean over 2 x 2 pixels and two dense layers, with the backward pass.

    The activation is tanh, because it is smooth. The last bit of a sum depends on the number of images of a rank. With
    a ReLU this bit could switch a unit on or off, and several ranks would not learn exactly the same as one process.

    Attributes:
        parameters: name -> array, first layer first.
    """

    def __init__(self, xp: Any, dtype: str, seed: int, channels: tuple[int, int] = (16, 32)) -> None:
        self.xp, self.channels = xp, channels
        self.parameters: dict[str, Array] = {}
        rng = np.random.default_rng(seed)
        sizes = {"conv1": (9, channels[0]), "conv2": (9 * channels[0], channels[1])}
        sizes |= {"dense1": (16 * channels[1], 64), "dense2": (64, 10)}
        for layer, (inputs, outputs) in sizes.items():
            weight = rng.standard_normal((inputs, outputs)) * 2 / np.sqrt(inputs)
            self.parameters[f"{layer}.weight"] = xp.asarray(weight, dtype)
            self.parameters[f"{layer}.bias"] = xp.zeros(outputs, dtype)

    def forward(self, images: Array) -> Array:
        """Returns the logits, of shape (count, 10), and keeps the arrays that the backward pass needs."""
        xp, p, count = self.xp, self.parameters, len(images)
        self.patches1 = patches(xp, images)
        self.conv1 = xp.tanh(self.patches1 @ p["conv1.weight"] + p["conv1.bias"])
        self.patches2 = patches(xp, self.conv1.reshape(count, 8, 8, -1))
        self.conv2 = xp.tanh(self.patches2 @ p["conv2.weight"] + p["conv2.bias"])
        self.pooled = self.conv2.reshape(count, 4, 2, 4, 2, -1).mean(axis=(2, 4)).reshape(count, -1)
        self.dense1 = xp.tanh(self.pooled @ p["dense1.weight"] + p["dense1.bias"])
        return self.dense1 @ p["dense2.weight"] + p["dense2.bias"]

    def backward(self, logits: Array, labels: Array) -> Iterator[tuple[str, Array]]:
        """Yields (name, gradient of the batch's mean cross-entropy) as soon as each gradient exists, last layer first.

        `delta` is always the gradient by the output of the next layer to compute.
        """
        xp, p, count = self.xp, self.parameters, len(labels)
        exponentials = xp.exp(logits - logits.max(axis=1, keepdims=True))
        delta = exponentials / exponentials.sum(axis=1, keepdims=True)
        delta[xp.arange(count), labels] -= 1
        delta /= count
        yield "dense2.bias", delta.sum(axis=0)
        yield "dense2.weight", self.dense1.T @ delta

        delta = (delta @ p["dense2.weight"].T) * (1 - self.dense1 * self.dense1)
        yield "dense1.bias", delta.sum(axis=0)
        yield "dense1.weight", self.pooled.T @ delta

        # Each pixel has a quarter of the mean over its 2 x 2 square.
        delta = (delta @ p["dense1.weight"].T).reshape(count, 4, 1, 4, 1, -1) / 4
        delta = xp.broadcast_to(delta, (count, 4, 2, 4, 2, self.channels[1])).reshape(self.conv2.shape)
        delta = delta * (1 - self.conv2 * self.conv2)
        yield "conv2.bias", delta.sum(axis=0)
        yield "conv2.weight", self.patches2.T @ delta

        # The gradient by a convolution's input is a convolution too, with the kernel turned by 180 degrees.
        turned = p["conv2.weight"].reshape(3, 3, *self.channels)[::-1, ::-1].transpose(0, 1, 3, 2)
        delta = patches(xp, delta.reshape(count, 8, 8, -1)) @ turned.reshape(-1, self.channels[0])
        delta = delta * (1 - self.conv1 * self.conv1)
        yield "conv1.bias", delta.sum(axis=0)
        yield "conv1.weight", self.patches1.T @ delta


def patches(xp: Any, images: Array) -> Array:
    """Returns the 3 x 3 neighbours of each pixel as one row (zeros outside), so that a convolution is a product."""
    padded = xp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = xp.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, 9 * images.shape[3])
