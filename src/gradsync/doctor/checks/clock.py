"""The clock: deadlines and timings go by it."""

from __future__ import annotations

import time

from gradsync.doctor.finding import Finding, ok, warning
from gradsync.doctor.surroundings import Surroundings

_SLOW = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
_EARLIEST = 1_700_000_000.0  # 2023: before gradsync


def check_clock(here: Surroundings) -> list[Finding]:
    """The date, and what the kernel reads the time from."""
    source = here.read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if here.now < _EARLIEST:
        date = time.strftime("%Y-%m-%d", time.gmtime(here.now))
        return [warning("clock", f"it is {date} here: logs go by that", "as root: timedatectl set-ntp true")]
    if source in _SLOW:
        text = f"{source}: reading the time takes microseconds, so that waiting and measuring cost more"
        available = here.read("/sys/devices/system/clocksource/clocksource0/available_clocksource") or ""
        fast = [name for name in available.split() if name not in _SLOW]
        advice = (
            f"as root: echo {fast[0]} > /sys/devices/system/clocksource/clocksource0/current_clocksource"
            if fast
            else ""
        )
        return [warning("clock", text, advice or "the kernel offers no faster one here")]
    return [ok("clock", source or "the kernel does not tell its source")]
