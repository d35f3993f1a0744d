import itertools
import threading
import time

import pytest

from dpdask.io.fragments import map_files


def test_what_is_found_is_in_the_order_of_the_files():
    for n_files in (0, 1, 2, 200):
        assert map_files(lambda number: 2 * number, range(n_files)) == [
            2 * number for number in range(n_files)
        ]


def test_files_that_are_waited_for_are_read_by_several_threads():
    threads = set()

    def wait(number: int) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.02)
        return number

    assert map_files(wait, range(1100)) == list(range(1100))
    assert len(threads) == 17  # the first file's, and the pool's


def test_files_at_hand_are_read_by_the_thread_that_asks(monkeypatch):
    clocks = {
        "perf_counter": itertools.count(),
        "thread_time": itertools.count(),
    }  # this thread always works, however busy the machine is
    for name, clock in clocks.items():
        monkeypatch.setattr(time, name, clock.__next__)
    threads = set()
    assert (
        map_files(lambda number: threads.add(threading.get_ident()), range(1000)) == [None] * 1000
    )
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("bad", [0, 150])
def test_a_file_that_cannot_be_read_ends_the_search(bad):
    def read(number: int) -> int:
        time.sleep(0.001)
        if number == bad:
            raise ValueError(number)
        return number

    with pytest.raises(ValueError, match=str(bad)):
        map_files(read, range(200))
