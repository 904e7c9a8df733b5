"""gradsync run --min-ranks, --respawn: a run that goes on without ranks that fail, or with new ones in their place."""

import re
import signal

import pytest

# Trains 20 steps. The first argument says what befalls which rank, "kill:1" for one and "kill:1@15" for when; the
# second, in how many of its lives.
SCRIPT = """
    import os, pathlib, signal, sys, threading, time
    import numpy as np
    import gradsync as gs

    def befall(how):
        match how:
            case "kill" | "stop":
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            case "raise":
                raise ValueError("boom")
            case "exit" | "early":
                sys.exit(3)
            case "leave":
                sys.exit()
            case "hang":
                time.sleep(1000)

    file = pathlib.Path(__file__).with_name("lives of " + os.environ["RANK"])
    with open(file, "a") as mine:
        mine.write("x")
    fate, when = "", 10
    for each in sys.argv[1].split(",") if file.stat().st_size <= int(sys.argv[2]) else ():
        how, _, who = each.partition(":")
        who, _, step = who.partition("@")
        if who == os.environ["RANK"]:
            fate, when = how, int(step or when)
    if fate == "early":
        befall(fate)
    if "joining" in sys.argv[1]:  # the victim dies while it waits for rank 0
        if fate:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif os.environ["RANK"] == "0":
            time.sleep(1.5)

    comm = gs.init_process_group("shm")
    sync = gs.AllreduceCallback("mean")
    state = {"step": np.zeros(1), "w": np.zeros(3)}
    while state["step"] < 20:
        try:
            gs.broadcast_tree(state, root=comm.most_advanced)
            while state["step"] < 20:
                if fate and state["step"] >= when:
                    befall(fate)
                with sync.backward():
                    gradient = np.ones(3)
                    sync("w", gradient)
                state["w"] -= gradient
                state["step"] += 1
        except (gs.RankFailed, gs.CollectiveTimeout):
            if "never" in sys.argv or ("once" in sys.argv and comm.world_size < int(os.environ["WORLD_SIZE"])):
                raise
            comm = gs.rebuild()
    os.write(1, f"{comm.member} ends as {comm.rank}/{comm.world_size}, {state['w'][0]}\\n".encode())
"""


@pytest.fixture
def run(cli, script):
    """Runs the script to its end, on three ranks; gives the exit code, the ends of the ranks, and stderr."""

    def start(options, fates, lives=1, *more, n=3, **settings):
        path = script(SCRIPT)
        code, out, err = cli("run", "--no-prefix", "-n", n, *options.split(), path, fates, lives, *more, **settings)
        return code, sorted(out.splitlines()), err

    return start


def ends(numbers):
    """What ranks print that have trained to the end together."""
    return [f"{number} ends as {rank}/{len(numbers)}, -20.0" for rank, number in enumerate(numbers)]


DIED = {
    "kill": "was killed by SIGKILL",
    "raise": "failed with exit code 1: ValueError: boom",
    "exit": "failed with exit code 3",
}


@pytest.mark.parametrize(("how", "who"), [("kill", 0), ("kill", 2), ("raise", 1), ("exit", 0)])
def test_the_others_go_on(how, who, run):
    code, out, err = run("--min-ranks 2", f"{how}:{who}")
    assert (code, out) == (0, ends([rank for rank in range(3) if rank != who])), err
    assert len(re.findall(rf"^gradsync: rank {who} \(pid .*\) {DIED[how]}; 2 of 3 ranks go on$", err, re.M)) == 1
    assert re.search(rf"^gradsync: after [\d.]+ s rank {who} .*; the others went on [\d.]+ s later:?$", err, re.M)
    assert ("ValueError: boom\ngradsync: 2 of 3" in err) == (how == "raise")  # the traceback, in the report
    assert re.fullmatch(r"gradsync: 2 of 3 ranks ended well, after 1 failure and 1 rebuild of [\d.]+ s", last(err))


def test_a_first_line_that_ends_in_a_colon_is_told_without_it(cli, script):
    path = script(
        """
        import gradsync as gs
        comm = gs.init_process_group("shm")
        try:
            gs.broadcast_tree([0] * comm.rank)
        except gs.PlanMismatch:
            if comm.rank:
                raise
        """
    )
    code, _, err = cli("run", "-n", 2, "--min-ranks", 1, path)
    assert code == 0, err
    assert re.search(
        r"^gradsync: rank 1 .*: gradsync.errors.PlanMismatch: .* rank 0 \(the root\); 1 of 2 ranks goes on$", err, re.M
    )


def last(text):
    return text.splitlines()[-1]


def test_two_die_at_once(run):
    code, out, err = run("--min-ranks 2", "kill:1,kill:2", n=4)
    assert (code, out) == (0, ends([0, 3])), err
    assert last(err).startswith("gradsync: 2 of 4 ranks ended well, after 2 failures and ")


def test_below_the_floor_all_end(run):
    code, out, err = run("--min-ranks 3", "kill:1")
    assert (code, out) == (137, []), err
    assert "\ngradsync: fewer than 3 ranks are left (--min-ranks, by default all)\n" in err
    assert re.fullmatch(r"gradsync: rank 1 \(.*\) was killed by SIGKILL", last(err))


def test_without_the_option_the_report_says_that_the_others_had_gone_on(cli, script):
    path = script(
        """
        import os, signal
        import gradsync as gs
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that a slow machine has the time for a new world
        comm = gs.init_process_group("shm")
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.barrier()
        except gs.RankFailed:
            gs.rebuild()
        """
    )
    code, _, err = cli("run", "-n", 3, path)
    sentence = "gs.rebuild() had made a new world of 2 ranks: with gradsync run --min-ranks 2 they would have gone on"
    assert (code, f"gradsync: {sentence}\ngradsync: rank 1 (" in err) == (137, True), err


def test_the_cause_is_the_failure_that_the_others_did_not_survive(run):
    code, out, err = run("--min-ranks 2", "kill:1,raise:2@15")
    assert (code, out) == (1, []), err
    assert re.search(
        r"^gradsync: after .* s rank 1 \(.*\) was killed by SIGKILL; the others went on [\d.]+ s later$", err, re.M
    )
    assert re.search(r"^gradsync: rank 2 \(.*\) failed with exit code 1:\nTraceback", err, re.M)
    assert (err.count(") was killed by SIGKILL"), last(err)) == (2, "ValueError: boom")  # at once, and in the report


def test_a_script_that_never_rebuilds_is_told_how(run):
    code, out, err = run("--min-ranks 2", "kill:0", 1, "never")
    assert (code, out) == (137, []), err
    assert "RankFailed" in err
    assert "\ngradsync: to go on without a rank, the others need to catch gs.RankFailed and gs.CollectiveTimeout" in err
    assert re.fullmatch(r"gradsync: rank 0 \(.*\) was killed by SIGKILL", last(err))


def test_a_report_names_ranks_as_they_were_launched(run):
    """Rank 1 of four is rank 0 of three when it leaves."""
    code, _, err = run("--min-ranks 2", "kill:0,leave:1@15", 1, "once", n=4)
    assert code == 1
    assert re.search(r"^gradsync: rank 1 \(pid \d+\) ended with exit code 0 before this failure$", err, re.M), err
    assert re.search(r"^gradsync: rank [23] \(.*\) failed with exit code 1, because of rank 1:$", err, re.M), err


def test_a_rank_that_hangs_until_the_deadline_is_ended(run):
    code, out, err = run("--min-ranks 2", "hang:1", environment={"GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS": "2"})
    assert (code, out) == (0, ends([0, 2])), err
    assert re.search(
        r"^gradsync: rank 1 \(.*\) was killed, as the others gave it up: .* waited .* for rank 1; ", err, re.M
    )
    assert "in befall\n      time.sleep(1000)" in err  # where it hung, in the report


@pytest.mark.slow  # 10 s
def test_a_rank_that_is_stopped_is_ended(run):
    code, out, err = run("--min-ranks 2", "stop:1")
    assert (code, out) == (0, ends([0, 2])), err
    assert re.search(r"^gradsync: rank 1 \(.*\) was killed, as the others gave it up: .* was stopped", err, re.M)


@pytest.mark.parametrize(
    ("how", "who", "lives"),
    [("kill", "1", 1), ("raise", "0", 1), ("kill", "2", 2), ("early", "1", 1), ("joining", "1", 1)],
)
def test_a_rank_is_started_again(how, who, lives, run, tmp_path):
    """Without --min-ranks the others wait for it."""
    code, out, err = run(f"--respawn {lives} --log-dir {tmp_path}", f"{how}:{who}", lives)
    assert (code, out) == (0, ends([0, 1, 2])), err
    assert re.search(rf"^gradsync: rank {who} .*; starting it again \({lives} of at most {lives}\)$", err, re.M)
    assert len(re.findall(r"; it was started again(; the others went on [\d.]+ s later)?:?$", err, re.M)) == lives
    failures = "1 failure" if lives == 1 else f"{lives} failures"
    assert last(err).startswith(f"gradsync: 3 of 3 ranks ended well, after {failures}")
    assert (tmp_path / f"rank-{who}.log").read_text().count("ends as") == 1


@pytest.mark.parametrize(("options", "how", "expected"), [("--respawn 1", "kill", 137), ("--min-ranks 2", "early", 3)])
def test_a_rank_that_cannot_be_replaced_ends_all(options, how, expected, run):
    """It has died more often than it may; or before there was a world, which needs all ranks."""
    code, out, err = run(options, f"{how}:1", 2)
    assert (code, out) == (expected, []), err
    assert re.search(r"rank 1 \(.*\) (was killed by SIGKILL|failed with exit code 3)$", last(err))


def test_the_same_error_of_a_rank_twice(run):
    code, _, err = run("--respawn 1", "raise:1", 2)
    assert code == 1
    assert re.search(r"^gradsync: rank 1 \(pid \d+ .*\) failed with exit code 1:\nTraceback", err, re.M), err
    assert "same error" not in err


def test_a_rank_that_nobody_waits_for_any_more_ends_quietly(run):
    """The others have rebuilt without it before it was there."""
    code, out, err = run("--min-ranks 2 --respawn 1", "kill:1")
    assert (code, out) == (0, ends([0, 2])), err
    assert err.count("gradsync: rank 1 ") == 1
    assert "; it was started again, but has not joined; the others went on" in err
    assert last(err).startswith("gradsync: 2 of 3 ranks ended well, after 1 failure and 1 rebuild")


def test_a_new_rank_is_in_the_next_world_where_another_dies_as_they_connect(cli, script):
    path = script(
        """
        import os, pathlib, signal
        import gradsync as gs
        from gradsync import process_group

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        file = pathlib.Path(__file__).with_name("life of " + os.environ["RANK"])
        is_first = not file.exists()
        file.touch()
        comm = gs.init_process_group("shm")
        if is_first:
            if comm.rank == 1:
                die()
            try:
                comm.barrier()
            except gs.RankFailed:
                if comm.rank == 2:
                    process_group.agree_and_connect = die  # when the others are there
                comm = gs.rebuild(min_ranks=3)
        os.write(1, f"{comm.objects.all_gather(comm.member)}\\n".encode())
        """
    )
    code, out, err = cli("run", "--no-prefix", "-n", 3, "--min-ranks", 2, "--respawn", 2, path)
    assert (code, out) == (0, 3 * "[0, 1, 2]\n"), err


def test_a_new_rank_waits_longer_than_for_those_that_start_with_it(cli, script):
    path = script(
        """
        import os, signal, time
        import numpy as np
        import gradsync as gs
        comm = gs.init_process_group("shm", timeout_seconds=1.0)
        is_new = comm.member == 0 and os.path.exists(__file__ + ".died")
        if comm.member == 0 and not is_new:
            open(__file__ + ".died", "w")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if not is_new:
                comm.all_reduce(np.ones(1))
        except gs.RankFailed:
            comm = gs.rebuild()  # of two
            time.sleep(2.5)
            comm = gs.rebuild(min_ranks=3)
        comm.barrier()
        os.write(1, f"{comm.world_size} ranks\\n".encode())
        """
    )
    code, out, err = cli("run", "--no-prefix", "-n", 3, "--min-ranks", 2, "--respawn", 1, path)
    assert (code, out) == (0, "3 ranks\n" * 3), err


def test_a_run_that_has_too_few_ranks_starts_again(run):
    code, out, err = run("--min-ranks 3 --max-restarts 1", "kill:1")
    assert (code, out) == (0, ends([0, 1, 2])), err
    assert last(err) == "gradsync: starting all ranks again (restart 1 of at most 1)"


def test_the_number_of_ranks_is_checked(run):
    code, _, err = run("--min-ranks 4", "kill:1")
    assert (code, last(err)) == (
        2, "gradsync: error: --min-ranks needs to be from 1 to 3, the number of ranks, got 4"
    )  # fmt: skip


def test_ctrl_c_ends_those_that_went_on(cli, script):
    path = script(
        """
        import os, signal, time
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
        """
    )
    launcher = cli.start("run", "--no-prefix", "-n", 3, "--min-ranks", 1, path)
    launcher.read_until("2 of 3 ranks go on", "stderr")
    launcher.send_signal(signal.SIGINT)
    code, _, err = launcher.result()
    assert (code, "stopping 2 ranks" in err, "left" in err) == (130, True, False)


def test_new_ranks_alone_do_not_begin_again_unnoticed(cli, script):
    """Rank 2 dies and waits to be taken in; then those die that have the state."""
    path = script(
        """
        import os, signal, time
        import numpy as np
        import gradsync as gs
        new = os.path.exists(__file__ + os.environ["RANK"])
        open(__file__ + os.environ["RANK"], "w").close()
        comm = gs.init_process_group("shm")
        if comm.member == 2 and not new:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.barrier()
        except gs.RankFailed:
            comm = gs.rebuild()
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(1, b"began again\\n")
        """
    )
    code, out, err = cli("run", "--no-prefix", "-n", 3, "--min-ranks", 1, "--respawn", 5, path)
    assert (code, out) == (137, ""), err
    assert "gradsync: no rank is left that has the state of the training, and new ones would begin at the start" in err
