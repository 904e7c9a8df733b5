"""All ranks are started again after a failure, with what they left in a directory of the user's."""

import command

from gradsync.launching.output import log_name

# Rank 1 fails until the third start, or that which is named; each start leaves a file.
FALTERING = """
    import os, sys
    from pathlib import Path
    import gradsync as gs
    restart, state = os.environ["TORCHELASTIC_RESTART_COUNT"], Path(sys.argv[1])
    with gs.init_process_group() as comm:
        print(restart, sorted(path.name for path in state.iterdir()), flush=True)
        comm.barrier()
        (state / f"{restart}-{comm.rank}").touch()
        comm.barrier()
        if comm.rank == 1 and int(restart) < int(sys.argv[2]):
            raise SystemExit(5)
"""
FIRST_TWO = ["0-0", "0-1", "1-0", "1-1"]


def run(tmp_path, *options, failures=2):
    script = command.write_script(tmp_path, FALTERING)
    state = tmp_path / "state"
    state.mkdir()
    return command.run("run", "--no-prefix", "-n", 2, *options, script, state, failures)


def test_ranks_start_again_and_find_their_state(tmp_path):
    """And log files of each start are kept."""
    code, out, err = run(tmp_path, "--max-restarts", 3, "--log-dir", tmp_path / "logs")
    assert code == 0, err
    assert out.splitlines() == [f"{n} {FIRST_TWO[: 2 * n]}" for n in (0, 0, 1, 1, 2, 2)]
    assert err.count("failed with exit code 5") == 2
    assert "gradsync: starting all ranks again (restart 2 of at most 3)\n" in err
    for restart in range(3):
        text = (tmp_path / "logs" / log_name(1, restart)).read_text()
        assert text == f"{restart} {FIRST_TWO[: 2 * restart]}\n"


def test_the_last_failure_counts_when_no_restart_is_left(tmp_path):
    code, out, err = run(tmp_path, "--max-restarts", 1)
    assert code == 5
    assert len(out.splitlines()) == 4
    assert "failed with exit code 5" in err.splitlines()[-1]


def test_stale_rank_of_an_earlier_start_is_refused(tmp_path):
    # The first start's rank 0 hides its way to the server in a file; the second start's plays it back.
    source = """
        import os, sys
        from pathlib import Path
        import gradsync as gs
        from gradsync import environment
        from gradsync.rendezvous.client import RendezvousClient
        file = Path(sys.argv[1])
        with gs.init_process_group() as comm:
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                comm.barrier()
                if comm.rank == 0:
                    file.write_bytes(environment.take_secret())
                comm.barrier()
                sys.exit(4)
            comm.barrier()
            try:
                RendezvousClient.connect(
                    os.environ["GRADSYNC_ADDRESS"], secret=file.read_bytes(), rank=0, world_size=2, timeout_seconds=60
                )
            except gs.AuthenticationError:
                print("refused", flush=True)
            comm.barrier()
        """
    script = command.write_script(tmp_path, source)
    code, out, err = command.run("run", "--no-prefix", "-n", 2, "--max-restarts", 1, script, tmp_path / "secret")
    assert (code, out) == (0, "refused\nrefused\n"), err


def test_each_start_counts_its_generations_from_one(tmp_path):
    source = """
        import os, sys
        import gradsync as gs
        from gradsync import process_group
        for _ in range(2):
            with gs.init_process_group() as comm:
                if comm.rank == 0:
                    print(os.environ["TORCHELASTIC_RESTART_COUNT"], process_group._client.generation, flush=True)
        sys.exit(1 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
        """
    script = command.write_script(tmp_path, source)
    code, out, _ = command.run("run", "--no-prefix", "-n", 2, "--max-restarts", 1, script)
    assert (code, out.split("\n")) == (0, ["0 1", "0 2", "1 1", "1 2", ""])
