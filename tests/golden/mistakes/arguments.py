# GRADSYNC_BACKEND=local python {}
"""Wrong arguments, each with its error."""

import numpy as np

import gradsync as gs


def show(what, call):
    try:
        print(f"{what}: returned {call()}")
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}")


with gs.init_process_group() as comm:
    make = gs.AllreduceCallback
    show("threshold_bytes='10MB'", lambda: make(threshold_bytes="10MB").threshold_bytes)
    show("threshold_bytes='a lot'", lambda: make(threshold_bytes="a lot").threshold_bytes)
    show("threshold_bytes=1e7", lambda: make(threshold_bytes=1e7).threshold_bytes)
    show("threshold_bytes=0", lambda: make(threshold_bytes=0).threshold_bytes)
    show("'avg'", lambda: make("avg"))
    show("bucket_cap_mb=25", lambda: make(bucket_cap_mb=25))
    show("nonfinite='ignore'", lambda: make(nonfinite="ignore"))
    show("missing='nope'", lambda: make(missing="nope"))
    show("clip_norm=-1", lambda: make(clip_norm=-1))
    show("group='world'", lambda: make(group="world"))
    show("backend='gloo'", lambda: make(backend="gloo"))

    def hand_over(gradient, name="weights", method="mean"):
        sync = make(method)
        with sync.backward():
            future = sync(name, gradient)
        return repr(future.result())

    show("a list", lambda: hand_over([1.0, 2.0]))
    show("a float", lambda: hand_over(1.0))
    show("None", lambda: hand_over(None))
    show("a NumPy scalar", lambda: hand_over(np.float64(1.0)))
    show("a mean of integers", lambda: hand_over(np.arange(3)))
    show("a sum of text", lambda: hand_over(np.array(["a"]), method="sum"))
    show("a list as name", lambda: hand_over(np.ones(2), name=["weights"]))

    def twice(first, second):
        sync = make()
        with sync.backward():
            sync("one", first)
            sync("two", second)

    scratch = np.ones(4)
    show("one scratch buffer for two layers", lambda: twice(scratch, scratch))
    show("a part of another gradient", lambda: twice(scratch, scratch[1:]))

    show("all_reduce of op 'avg'", lambda: comm.all_reduce(np.ones(2), "avg"))
    show("all_reduce into another dtype", lambda: comm.all_reduce(np.ones(2), out=np.ones(2, np.float32)))
    show("all_reduce of a read-only array", lambda: comm.all_reduce(np.broadcast_to(np.ones(1), (2,))))
    show("broadcast from rank 7", lambda: comm.broadcast(np.ones(2), 7))
    show("send to oneself", lambda: comm.send(np.ones(2), 0))
    show("a group of rank 3", lambda: comm.new_group([3]))
    show("init twice", lambda: gs.init_process_group())
    show("bcast_list_ of a number", lambda: gs.bcast_list_([1.0]))
    show("average_gradients of text", lambda: gs.average_gradients({"a": "b"}))
    show("offsets of a shape below 0", lambda: gs.get_offsets([(-1,)]))

show("backend 'gloo'", lambda: gs.init_process_group("gloo"))
show("rank without world_size", lambda: gs.init_process_group(rank=1))
show("rank 2 of 2", lambda: gs.init_process_group(rank=2, world_size=2))
show("a free port as text", lambda: gs.launch(print, nprocs="2"))
