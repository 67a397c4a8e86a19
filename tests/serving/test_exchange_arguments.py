"""Arguments of an exchange and of its calls: types, names and bounds."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvplan.serving import Compatibility, Exchange, Target
from tests.serving.test_exchange import MakeWorker
from tests.serving.worker import INSTANCE, reference
from tests.support.held import Held


@pytest.mark.parametrize("endless", [float("inf"), None])
def test_the_timeout_of_a_wait_is_checked(make_worker: MakeWorker, endless: float | None) -> None:
    producer, consumer = make_worker(1), make_worker(2)
    producer.finish(0, 11, [4, 9, 2], 21)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout_ms="):
            consumer.exchange.wait(wrong)
    consumer.exchange.fetch("mine", reference([producer.source], 0, 11, 21), Target([7, 1, 30]))
    assert consumer.exchange.wait(endless)
    assert [result.error for result in consumer.exchange.take_results()] == [None]


def test_an_argument_of_another_type_is_named(make_worker: MakeWorker) -> None:
    item = make_worker()
    right = {
        "engine": item.engine,
        "cache": item.cache,
        "compatibility": Compatibility({}),
        "instance": INSTANCE,
    }
    held = Held.now()
    for name in (*right, "place", "push", "options"):
        arguments = cast(Any, {**right, name: 0})
        with pytest.raises(TypeError, match=f"^{name}=0 must be "):
            Exchange(**arguments)
    with pytest.raises(TypeError, match=r"^cache=Cache.* must be CacheGroup"):
        Exchange(item.engine, cast(Any, [item.cache]), Compatibility({}), INSTANCE)
    held.check_nothing_new()


def test_arguments_of_the_wrong_type_are_refused_by_name(make_worker: MakeWorker) -> None:
    """No result would follow, or no consumer could ever fetch the request."""
    worker = make_worker()
    exchange, target = worker.exchange, Target([7, 1, 30])
    wanted, wrong = reference([worker.source], 0, 11, 21), cast(Any, 5)
    for name, call in (
        ("request", lambda: exchange.fetch(wrong, wanted, target)),
        ("request", lambda: exchange.expect(wrong, wanted)),
        ("request", lambda: exchange.drop(wrong, wanted)),
        ("reference", lambda: exchange.fetch("mine", wrong, target)),
        ("reference", lambda: exchange.expect("mine", wrong)),
        ("reference", lambda: exchange.drop("mine", wrong)),
        ("target", lambda: exchange.fetch("mine", wanted, wrong)),
        ("target.first_token", lambda: exchange.fetch("mine", wanted, Target([7], cast(Any, 0.5)))),
        ("request", lambda: exchange.enter(wrong, [1], bytes(16))),
        ("digest", lambda: exchange.enter("mine", [1], wrong)),
        ("transfer", lambda: exchange.enter("mine", [1], bytes(16), wrong)),
        ("handle", lambda: exchange.enter("mine", [1], bytes(16), handle=wrong)),
    ):
        with pytest.raises(TypeError, match=rf"^{name}=\S+ must be "):
            call()
    assert not exchange.is_fetching
    assert len(exchange.book) == 0
