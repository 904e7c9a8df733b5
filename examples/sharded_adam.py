"""Adam whose moments are divided among the ranks (ZeRO, stage 1): each of N ranks keeps one N-th of them.

    gradsync run -n 2 examples/sharded_adam.py state.npz    # trains the transformer of transformer.py, and saves
    gradsync run -n 3 examples/sharded_adam.py state.npz    # goes on from there, on any number of ranks

All parameters lie in one flat array, one after the other. In a step, reduce_scatter gives each rank the mean gradient
of its part, the rank updates that part of the parameters, and all_gather gives every rank the whole. This sends as many
bytes as an all-reduce, and as Adam works element by element, the parameters have the bits of Adam on every rank.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020.
"""

import sys
from pathlib import Path

import numpy as np

import gradsync as gs
from transformer import Adam, batches, forward, make_parameters


class ShardedAdam:
    """Adam on this rank's part of the parameters.

    Attributes:
        parameters: name -> array, a view of the flat parameters.
        gradients: name -> array, likewise: write the gradients of a step into them.
    """

    def __init__(self, comm, parameters, rate):
        self.comm, self.shapes = comm, {name: value.shape for name, value in parameters.items()}
        self.flat = np.concatenate([value.reshape(-1) for value in parameters.values()])
        self.flat_gradients = np.zeros_like(self.flat)
        self.parameters, self.gradients = self.by_name(self.flat), self.by_name(self.flat_gradients)

        share, more = divmod(len(self.flat), comm.world_size)
        self.sizes = [share + (rank < more) for rank in range(comm.world_size)]
        begin = sum(self.sizes[: comm.rank])
        self.mine = slice(begin, begin + self.sizes[comm.rank])
        self.adam = Adam({"mine": self.flat[self.mine]}, rate)  # any optimiser that works element by element

    def by_name(self, flat):
        """Returns name -> view of a flat array."""
        shapes = list(self.shapes.values())
        return dict(zip(self.shapes, gs.param_pack_split(flat, gs.get_offsets(shapes), shapes), strict=True))

    def step(self):
        mean = self.comm.reduce_scatter(self.flat_gradients, "mean", sizes=self.sizes)
        self.adam.step({"mine": mean})  # writes into this rank's part of the flat parameters
        self.comm.all_gather(self.flat[self.mine], sizes=self.sizes, out=self.flat)

    def parts(self):
        """Returns this rank's parts of all that Adam needs: parameters, first and second moments."""
        first, second = self.adam.moments["mine"]
        return {"parameters": self.flat[self.mine], "first": first, "second": second}

    def save(self, path):
        """Rank 0 writes the state by name, whole, so that any number of ranks can load it. Every rank must call it."""
        wholes = {kind: self.comm.gather(part, root=0, sizes=self.sizes) for kind, part in self.parts().items()}
        if self.comm.rank == 0:
            arrays = {f"{kind}/{n}": a for kind, whole in wholes.items() for n, a in self.by_name(whole).items()}
            np.savez(path, steps=self.adam.steps, **arrays)

    def load(self, path):
        """Every rank reads its part."""
        with np.load(path) as saved:
            self.adam.steps = int(saved["steps"])
            for kind, part in self.parts().items():
                part[...] = np.concatenate([saved[f"{kind}/{name}"].reshape(-1) for name in self.shapes])[self.mine]
        self.comm.all_gather(self.flat[self.mine], sizes=self.sizes, out=self.flat)


def train(comm, optimizer, steps):
    for step, batch in zip(range(steps), batches(np.random.default_rng(comm.rank)), strict=False):
        loss, backward = forward(optimizer.parameters, batch)
        for name, gradient in backward():
            optimizer.gradients[name][...] = gradient
        optimizer.step()
        if step in (0, steps - 1):
            loss = gs.average_gradients(loss)
            if comm.rank == 0:
                print(f"step {optimizer.adam.steps}: loss {loss:.2f}", flush=True)


if __name__ == "__main__":
    path = Path(sys.argv[1]) if sys.argv[1:] else None
    with gs.init_process_group() as comm:
        parameters = make_parameters(np.random.default_rng(0))  # the same on all ranks
        optimizer = ShardedAdam(comm, parameters, rate=1e-3)
        if path and path.exists():
            optimizer.load(path)
        if comm.rank == 0:
            print(f"moments of {optimizer.sizes[0]:,} of {len(optimizer.flat):,} parameters on this rank")
        train(comm, optimizer, steps=50)
        if path:
            optimizer.save(path)
