"""What comes down the report pipe and is no report: told in words, and the launcher goes on."""

import re

import command
import pytest


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("b'gradsync error\\n'", "Expecting value"),
        ("b'?' + bytes(16)", r"b'\?.*' is no report"),
        ("b'gradsync'", "b'gradsync' is no report"),
    ],
)
def test_what_is_no_report_is_told_and_the_launcher_goes_on(tmp_path, written, told):
    """A library that writes to a descriptor of somebody else's meets the launcher's pipe, too."""
    script = command.write_script(
        tmp_path,
        f"""
        import os, stat, time
        pipes = [int(name) for name in os.listdir("/proc/self/fd")]
        for number in pipes:
            try:
                if number > 2 and stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.write(number, {written})
            except OSError:
                pass
        time.sleep(100)
        """,
    )
    code, _, err = command.run("run", "-n", 1, script)
    assert code == 1
    assert re.search(f"the report of this rank cannot be read .*{told}", err), err
    assert "Traceback" not in err
