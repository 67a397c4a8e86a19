"""Results of tuning on simulated machines, which have a clock of their own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from kvnative._tuning import NEVER, Tuning, builtin_tuning
from kvplan.cli import main
from kvplan.cli.tune import host
from kvplan.cli.tune.host import BUDGET_MS, calibrate
from kvplan.execution.tuning import Finding

MIB = 1 << 20
BUILTIN = Tuning(4, 4 * MIB, 512 << 10)


class Machine:
    """A simulated machine with a clock, on which a copy takes the time that `ns` returns.

    Args:
        ns: Time of a copy of so many bytes with a tuning.
        noise: Bound of a random addition, as a part of the time.
        share: Part of the cores that the threads get.
        setup_ns: Additional time of each measurement.
    """

    def __init__(
        self,
        ns: Callable[[int, Tuning], float],
        noise: float = 0.0,
        share: float = 0.98,
        setup_ns: int = 100_000,
    ) -> None:
        self.now = 1_000_000_000
        self._ns, self._noise, self._share, self._setup_ns = ns, noise, share, setup_ns
        self._random = random.Random(7)

    def clock(self) -> int:
        return self.now

    def measure(
        self, tunings: Sequence[Tuning], nbytes: int, rounds: int, deadline_ns: int
    ) -> tuple[list[list[int]], float]:
        self.now += self._setup_ns
        done = []
        for _ in range(rounds):
            row = []
            for tuning in tunings:
                best = int(self._ns(nbytes, tuning))
                row.append(int(best * (1 + self._random.random() * self._noise)))
                self.now += 3 * row[-1]
                if self.now >= deadline_ns:
                    return done, self._share
            done.append(row)
        return done, self._share

    def tuned(self, builtin: Tuning = BUILTIN) -> Finding:
        return calibrate(builtin, self.measure, self.clock)


def usual(cache_nbytes: int = 4 * MIB) -> Callable[[int, Tuning], float]:
    """Return the built-in times: 60 GB/s in the cache, 15 beyond, and 25 with bypassing stores."""

    def ns(nbytes: int, tuning: Tuning) -> float:
        if nbytes >= tuning.bypass_nbytes:
            return nbytes / 25
        return nbytes / (60 if nbytes < cache_nbytes else 15)

    return ns


def test_a_usual_machine_keeps_the_built_in_tuning() -> None:
    found = Machine(usual()).tuned()
    assert (found.tuning, found.sure) == (BUILTIN, True)
    assert all("as built in" in reason for reason in found.reasons)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3, 0.5])
def test_noise_changes_nothing(noise: float) -> None:
    assert Machine(usual(), noise).tuned().tuning == BUILTIN


@pytest.mark.parametrize(
    ("cache_mib", "bypass_mib"), [(1, 1), (2, 2), (3, 4), (6, 8), (16, 16), (100, 32)]
)
def test_caches_of_another_size(cache_mib: int, bypass_mib: int) -> None:
    found = Machine(usual(cache_mib * MIB), 0.1).tuned()
    assert found.sure
    assert found.tuning == BUILTIN._replace(bypass_nbytes=bypass_mib * MIB)


def test_the_caches_are_bypassed_from_the_size_on_that_gains_at_every_larger_one() -> None:
    """A gain below a size that loses does not count."""

    def ns(nbytes: int, tuning: Tuning) -> float:
        bypasses = nbytes >= tuning.bypass_nbytes
        return nbytes / (15 if bypasses == (nbytes == 8 * MIB) else 25)

    assert Machine(ns).tuned().tuning.bypass_nbytes == 16 * MIB


def test_a_clearly_faster_tuning_is_used() -> None:
    def ns(nbytes: int, tuning: Tuning) -> float:
        faster = 0.8 if tuning.piece_nbytes == 1 << 20 else 1.0
        faster *= 0.8 if tuning.threads == 2 else 1.0
        return usual()(nbytes, tuning) * faster

    found = Machine(ns, 0.05).tuned()
    assert found.tuning == Tuning(2, 4 * MIB, 1 << 20)
    assert any(reason.startswith("threads: 2, ") for reason in found.reasons)


def test_a_slightly_faster_tuning_is_not_used() -> None:
    def ns(nbytes: int, tuning: Tuning) -> float:
        return usual()(nbytes, tuning) * (0.92 if tuning.threads == 2 else 1.0)

    assert Machine(ns).tuned().tuning.threads == 4


@pytest.mark.parametrize(("rounds", "won", "threads"), [(5, 3, 4), (5, 4, 2), (4, 3, 2)])
def test_a_tuning_that_is_faster_in_few_rounds_is_not_used(
    rounds: int, won: int, threads: int
) -> None:
    """Half of the time in most rounds, in the median and at best, but not in enough."""
    turns = itertools.count()

    def ns(nbytes: int, tuning: Tuning) -> float:
        is_faster = tuning.threads == 2 and next(turns) % rounds < won
        return usual()(nbytes, tuning) * (0.5 if is_faster else 1.1 if tuning.threads == 2 else 1.0)

    machine = Machine(ns)

    def measure(
        tunings: Sequence[Tuning], nbytes: int, most: int, deadline_ns: int
    ) -> tuple[list[list[int]], float]:
        return machine.measure(tunings, nbytes, min(rounds, most), deadline_ns)

    assert calibrate(BUILTIN, measure, machine.clock).tuning.threads == threads


def test_a_tuning_whose_best_round_is_not_faster_is_not_used() -> None:
    """The built-in tuning is as fast in the first round, before the other one was measured."""
    measured = []

    def ns(nbytes: int, tuning: Tuning) -> float:
        if tuning.threads == 2:
            measured.append(nbytes)
        is_slow = tuning.threads == 1 or (tuning.threads == 4 and measured)
        return usual()(nbytes, tuning) * (1.0 if is_slow else 0.8)

    assert Machine(ns).tuned().tuning.threads == 4
    assert measured


@pytest.mark.parametrize(
    "machine",
    [
        Machine(usual(MIB), share=0.6),  # others have the cores, all the time
        Machine(usual(MIB), noise=9.0),  # or now and then
        # or the machine is too slow to measure in time
        Machine(lambda *copy: 100 * usual(MIB)(*copy)),
        # or only for the last comparison, after another tuning was found
        Machine(
            lambda nbytes, tuning: usual(MIB)(nbytes, tuning) * (1 if tuning.threads > 1 else 1000)
        ),
    ],
)
def test_a_busy_machine_keeps_the_built_in_tuning_with_a_warning(machine: Machine) -> None:
    found = machine.tuned()
    assert (found.tuning, found.sure) == (BUILTIN, False)
    assert "other processes used the machine; the built-in tuning stays" in found.reasons[0]


SURE = Finding(BUILTIN, True, ("threads: 4, by 20 percent",), 12.0, "2026-11-25T18:50:00Z")
UNSURE = SURE._replace(sure=False, reasons=("other processes used the machine",))
FOUND = "4 threads, past the caches from 4 MiB on"


@pytest.mark.parametrize(
    ("findings", "code", "lines"),
    [
        ([SURE], 0, [FOUND, "  threads: 4, by 20 percent"]),
        ([UNSURE, UNSURE, SURE], 0, [FOUND, "  threads: 4, by 20 percent"]),
        ([UNSURE] * 5, 2, ["other processes used the machine"]),
    ],
    ids=["at once", "the third time", "never"],
)
def test_a_disturbed_measurement_is_repeated_up_to_four_times(
    findings: list[Finding],
    code: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = iter(findings)
    monkeypatch.setattr(host, "tune", lambda builtin: next(left))
    assert main(["tune", "--only", "host", "--dry-run"]) == code
    first, *reasons = capsys.readouterr().out.splitlines()
    assert [first.removeprefix("host memory, measured in 12 ms: "), *reasons] == lines
    assert [*left] == []


@pytest.mark.parametrize("slower", [1, 4, 20, 1000])
def test_the_time_limit_is_kept(slower: int) -> None:
    """Only three copies in a row, which are under way at the deadline, add to the time."""
    machine = Machine(lambda *copy: slower * usual()(*copy))
    copy_ms = 3 * slower * usual()(16 * MIB, BUILTIN) / 1e6
    assert machine.tuned().took_ms <= BUDGET_MS + copy_ms + 1


def test_a_processor_that_cannot_write_past_the_caches() -> None:
    builtin = BUILTIN._replace(bypass_nbytes=NEVER)
    found = Machine(usual(MIB)).tuned(builtin)
    assert (found.tuning, found.sure) == (builtin, True)
    assert not any("past the caches" in reason for reason in found.reasons)


def test_this_machine_can_be_measured() -> None:
    found = host.tune(builtin_tuning(), crowded=lambda: False)
    assert 1 <= found.tuning.threads <= builtin_tuning().threads
    assert found.reasons


def test_a_crowded_machine_is_not_measured() -> None:
    assert host.is_crowded() in (False, True)
    found = host.tune(builtin_tuning(), crowded=lambda: True)
    assert (found.tuning, found.sure) == (builtin_tuning(), False)
    assert found.reasons == (
        "more threads want to run than there are cores; the built-in tuning stays",
    )
