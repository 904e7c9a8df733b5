"""One of four ranks is killed at a random moment, again and again: the others go on, and a new one takes its place.

ROUNDS=300 pytest -m slow tests/e2e/test_deaths.py -s: in so many rounds, and the times are printed.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROUNDS = int(os.environ.get("ROUNDS", "12"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180 + 20 * ROUNDS)]

# A step is the same in both programs.
STEP = """
    import hashlib, json, os, random, signal, sys, threading, time
    from pathlib import Path

    import numpy as np
    import gradsync as gs

    folder, seed, rounds, how = Path(sys.argv[1]), *sys.argv[2:]
    SIZES = [30_000, 5_000, 50, 1]  # one alone in its bucket, the others packed

    def train(comm, sync, state, steps):
        for _ in range(steps):
            dice = np.random.default_rng([state["step"], comm.rank])
            with sync.backward():
                for number, weights in enumerate(state["weights"]):
                    sync(number, dice.normal(size=len(weights)) - weights)
            for weights, velocity, gradient in zip(state["weights"], state["velocity"], sync.results().values()):
                velocity *= 0.9
                velocity += gradient
                weights += 0.01 * velocity
            state["step"] += 1

    def digest(state):
        return hashlib.sha1(np.concatenate(state["weights"] + state["velocity"]).tobytes()).hexdigest()
"""

DYING = (
    STEP
    + """
    def tell(**what):
        line = json.dumps(what | {"at": time.monotonic(), "member": int(os.environ["RANK"])})
        with open(folder / "told", "a") as file:
            file.write(line + "\\n")

    def die_within(seconds):
        def die():
            frame = sys._current_frames()[threading.main_thread().ident]
            tell(what="dies", where=frame.f_code.co_name)
            os.kill(os.getpid(), getattr(signal, how))
        timer = threading.Timer(random.uniform(0.0, seconds), die)
        timer.daemon = True
        timer.start()

    def held():
        "Descriptors, shared mappings, threads, and MB of memory of this process."
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[1].endswith("s")]
        megabytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        return len(os.listdir("/proc/self/fd")), len(mapped), len(os.listdir("/proc/self/task")), megabytes

    state = {"weights": [np.zeros(size) for size in SIZES], "velocity": [np.zeros(size) for size in SIZES]}
    state |= {"step": 0, "round": 0}
    tell(what="joins")
    comm = gs.init_process_group()
    sync = gs.AllreduceCallback("mean", threshold_bytes=100_000)
    is_new, kills = True, ""
    while True:
        try:
            everybody = comm.objects.all_gather((os.getpid(), is_new, state["step"]))
            steps = [step for _, is_new, step in everybody if not is_new] or [0]
            world = " ".join(f"{pid}" for pid, *_ in everybody) + f" {max(steps)}"
            tell(what="lives", world=world, ranks=len(everybody))  # this was the next good collective
            assert max(steps) - min(steps) <= 1, steps
            assert everybody[comm.most_advanced][2] == max(steps), (comm.most_advanced, everybody)
            state, is_new = gs.broadcast_tree(state, root=comm.most_advanced), False
            if state["round"] == int(rounds):
                break
            dice = random.Random(f"{seed} {state['round']}")
            first, second = dice.sample(range(3), 2)
            kills = dice.choice(["one", "two", "one in the rebuild"]) if how == "SIGKILL" else "one"
            if comm.world_size == 4:
                if comm.member == 3:  # it lives for ever
                    tell(what="holds", held=held())
                elif comm.member == first or (comm.member == second and kills == "two"):
                    die_within(0.05)
                train(comm, sync, state, 10**9)
            if comm.member == 3:
                np.savez(folder / f"{world}.npz", *state["weights"], *state["velocity"], state["step"])
            train(comm, sync, state, 5)
            tell(what="trained", world=world, digest=digest(state))
            state["round"] += 1
            comm = gs.rebuild(min_ranks=4, timeout_seconds=60)
        except gs.RankFailed:
            if kills == "one in the rebuild" and comm.member == second:
                die_within(0.03)
            comm = gs.rebuild()
    gs.destroy_process_group()
"""
)

FRESH = (
    STEP
    + """
    comm = gs.init_process_group()
    for path in sorted(folder.glob("*.npz")):
        if path.stem.count(" ") == comm.world_size:
            with np.load(path) as saved:
                *arrays, step = saved.values()
            state = {"weights": arrays[:len(SIZES)], "velocity": arrays[len(SIZES):], "step": int(step)}
            train(comm, gs.AllreduceCallback("mean", threshold_bytes=100_000, name=path.stem), state, 5)
            if comm.rank == 0:
                path.with_suffix(".fresh").write_text(digest(state))
    gs.destroy_process_group()
"""
)


def held_by(pid):
    """Descriptors, threads, child processes, and MB of memory of a process."""
    folder = Path("/proc", str(pid))
    children = sum(len(path.read_text().split()) for path in folder.glob("task/*/children"))
    megabytes = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), children, megabytes


def train_dying(cli, script, folder, rounds, how):
    """Gives what the ranks told, and what the launcher held from time to time."""
    seed, samples = random.randrange(10**9), []
    print(f"\nseed {seed}")
    words = ["run", "-n", 4, "--min-ranks", 2, "--respawn", 3 * rounds, script(DYING, "dying.py")]
    with open(folder / "printed", "w+") as printed:
        launcher = cli.start(*words, folder, seed, rounds, how, stdout=printed, stderr=printed)
        while launcher.poll() is None:
            samples.append(held_by(launcher.pid))
            time.sleep(0.1)
        printed.seek(0)
        assert launcher.returncode == 0, printed.read()[-5000:]
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()], samples


def seconds_to_the_next_collective(told):
    """For each death: until all who live have completed a collective, if no other has died before."""
    deaths = sorted(line["at"] for line in told if line["what"] == "dies")
    worlds = {}
    for line in told:
        if line["what"] == "lives":
            worlds.setdefault((line["world"], line["ranks"]), []).append(line["at"])
    whole = [times for (_, ranks), times in worlds.items() if len(times) == ranks]
    seconds = []
    for death, following in zip(deaths, [*deaths[1:], float("inf")], strict=True):
        ends = [max(times) for times in whole if min(times) > death]
        if ends and min(ends) < following:
            seconds.append(min(ends) - death)
    return seconds


def check_weights(cli, script, folder, told):
    """The survivors have the same bits, which are those of a fresh run of so many ranks from the same state."""
    trained = {}
    for line in told:
        if line["what"] == "trained":
            trained.setdefault(line["world"], []).append(line["digest"])
    for ranks in (2, 3):
        assert cli("run", "-n", ranks, script(FRESH, "fresh.py"), folder, 0, 0, "", timeout=600).code == 0
    for world, digests in trained.items():
        assert {(folder / f"{world}.fresh").read_text()} == set(digests)
    return len(trained)


def check_constant(samples):
    """The second half of them holds no more than the first one: in the middle, for in a rebuild there is more."""
    halves = np.array_split(samples[len(samples) // 6 :], 2)  # what is made once, on first use, is no leak
    early, late = (np.median(half, axis=0) for half in halves)
    assert (late - early <= [1, 1, 1, 3]).all(), (early, late)


def seconds_to_take_part(told):
    """For each rank that was started again: from its call of init_process_group() to its first collective."""
    joins, seconds = {}, []
    for line in told:
        if line["what"] == "joins":
            joins[line["member"]] = line["at"]
        elif line["what"] == "lives" and line["member"] in joins:
            seconds.append(line["at"] - joins.pop(line["member"]))
    return seconds[4:]  # without those of the launch


def test_four_ranks_of_which_one_or_two_die_again_and_again(cli, script, tmp_path):
    told, samples = train_dying(cli, script, tmp_path, ROUNDS, "SIGKILL")
    seconds, joining = seconds_to_the_next_collective(told), seconds_to_take_part(told)
    print(f"{len(seconds)} deaths: median {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s")
    print(f"{len(joining)} took part again in {statistics.median(joining):.3f} s, {max(joining):.3f} s at most")
    print("they died in", Counter(line["where"] for line in told if line["what"] == "dies").most_common())
    assert check_weights(cli, script, tmp_path, told) >= 0.9 * ROUNDS
    assert len(seconds) >= 0.9 * ROUNDS
    assert max(seconds) < 2
    assert max(joining) < 2
    check_constant([line["held"] for line in told if line["what"] == "holds"])
    check_constant(samples)


def test_a_rank_that_is_stopped_counts_as_dead_after_ten_seconds(cli, script, tmp_path):
    told, _ = train_dying(cli, script, tmp_path, 2, "SIGSTOP")
    seconds = seconds_to_the_next_collective(told)
    print(f"{seconds} s")
    assert len(seconds) == check_weights(cli, script, tmp_path, told) == 2
    assert 9 < min(seconds) <= max(seconds) < 12
