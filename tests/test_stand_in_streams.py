"""The stand-in for CuPy under tests/stand_in: streams, events and devices; what is not ordered shows."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stand_in_processes import Gate, Rank, run


def _order(r: Rank) -> None:
    producer, consumer = (r.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    source, target = r.full(0), r.full(0)
    r.cupy.cuda.Device().synchronize()
    gate = Gate(producer)
    with producer:
        source += 1
    event = producer.record()
    with consumer:
        target += source
        assert target.get().tolist() == [0] * 4  # stale: nothing orders the two streams
        consumer.wait_event(event)
        target += source
    assert not event.done
    assert not consumer.done
    gate.open()
    event.synchronize()
    assert target.get(stream=consumer).tolist() == [1] * 4
    assert r.cupy.cuda.Event().done
    with pytest.raises(RuntimeError, match="does not match"), r.cupy.cuda.Device(1):
        producer.use()


def test_only_events_order_streams() -> None:
    run(_order, GRADSYNC_STAND_IN_DEVICES="2")


def _recorded_again(r: Rank) -> None:
    first, second, waiting = (r.cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    event = first.record()
    waiting.wait_event(event)
    gate = Gate(second)
    second.record(event)
    waiting.synchronize()  # waits for what was recorded when it began to wait
    assert not event.done
    gate.open()
    event.synchronize()
    before, after = r.cupy.cuda.Event(), r.cupy.cuda.Event()
    before.record(first)
    after.record(first)
    after.synchronize()
    assert r.cupy.cuda.get_elapsed_time(before, after) >= 0
    with pytest.raises(r.cupy.cuda.runtime.CUDARuntimeError):
        r.cupy.cuda.get_elapsed_time(before, r.cupy.cuda.Event(disable_timing=True))


def test_an_event_recorded_again() -> None:
    run(_recorded_again)


def _null_stream(r: Rank) -> None:
    blocking, free = r.cupy.cuda.Stream(), r.cupy.cuda.Stream(non_blocking=True)
    gate = Gate(blocking)
    array = r.full(0)  # on the null stream, behind the gate
    assert not r.cupy.cuda.Stream.null.done
    with free:
        r.full(0).get()
    with blocking:
        array += 1
    gate.open()
    assert array.get().tolist() == [1] * 4
    handle = blocking.ptr
    del blocking
    assert not r.cupy.cuda.Stream.null.ptr
    with pytest.raises(r.cupy.cuda.runtime.CUDARuntimeError, match="invalid resource handle"):
        r.cupy.cuda.runtime.streamQuery(handle)


def test_the_null_stream_waits_for_blocking_streams() -> None:
    run(_null_stream)


def _delayed(r: Rank) -> None:
    producer, consumer = (r.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    array = r.full(0)
    array.get()
    with producer:
        for _ in range(20):
            array += 1
    event = producer.record()
    with consumer:
        assert array.get().tolist() != [20] * 4
        consumer.wait_event(event)
        assert array.get().tolist() == [20] * 4


def test_random_delays_show_a_missing_event() -> None:
    run(_delayed, GRADSYNC_STAND_IN_DELAY_MS="5")


def _failing_work(r: Rank) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    error = r.cupy.cuda.runtime.CUDARuntimeError
    stream, event = r.cupy.cuda.Stream(non_blocking=True), r.cupy.cuda.Event()
    gate = Gate(stream)
    stream.launch_host_func(fail, None)
    event.record(stream)
    gate.open()
    with pytest.raises(error, match="cudaErrorLaunchFailure"):
        stream.synchronize()
    with pytest.raises(error):
        event.synchronize()
    with pytest.raises(error):
        r.cupy.zeros(3)
    assert not event.done  # for ever: cudaEventQuery, as CuPy reads it, tells an error as "not done"
    assert r.cupy.cuda.runtime.eventQuery(event.ptr) == 719


def test_an_error_on_the_device_is_sticky() -> None:
    run(_failing_work)


def _fork(r: Rank) -> None:
    r.cupy.zeros(1).get()
    pid = os.fork()
    if pid == 0:
        try:
            r.cupy.zeros(1)
        except r.cupy.cuda.runtime.CUDARuntimeError as error:
            os._exit(error.status)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_a_fork_cannot_use_the_device() -> None:
    run(_fork)


def _devices(r: Rank) -> None:
    runtime = r.cupy.cuda.runtime
    assert runtime.getDeviceCount() == 2
    assert [runtime.deviceGetPCIBusId(n) for n in range(2)] == ["0000:03:00.0", "0000:01:00.0"]
    with pytest.raises(runtime.CUDARuntimeError, match="invalid device ordinal"):
        r.cupy.cuda.Device(2).use()
    array = r.full(1)
    r.cupy.cuda.get_current_stream().synchronize()  # the copy below runs on a stream of the other device
    with r.cupy.cuda.Device(1):
        assert r.cupy.zeros(2).device.id == 1
        with pytest.raises(ValueError, match="different from the current device"):
            array + 1
        copy = array.copy()
    assert (copy.device.id, copy.get().tolist()) == (1, [1] * 4)
    with pytest.raises(runtime.CUDARuntimeError, match="invalid resource handle"):
        r.cupy.cuda.Event().record(_stream_of(r, 1))


def _stream_of(r: Rank, device_id: int) -> Any:
    with r.cupy.cuda.Device(device_id):
        return r.cupy.cuda.Stream()


def test_visible_devices() -> None:
    run(_devices, GRADSYNC_STAND_IN_DEVICES="4", CUDA_VISIBLE_DEVICES="3,1,7,0")


def _no_device(r: Rank) -> None:
    with pytest.raises(r.cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorNoDevice"):
        r.cupy.cuda.runtime.getDeviceCount()
    assert not r.cupy.cuda.is_available()


def test_no_visible_device() -> None:
    run(_no_device, CUDA_VISIBLE_DEVICES="")
