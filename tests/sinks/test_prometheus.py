"""What a scrape returns, from the process's registry and over HTTP."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from ghoststep.errors import UsageError
from ghoststep.evidence.steps import RunFacts
from ghoststep.finding import Severity
from ghoststep.sinks import Sinks
from ghoststep.sinks.prometheus import PrometheusSink
from tests.sinks.made_up import FACTS, run

client = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: pip install prometheus-client")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
    return free


def scrape(port: int, address: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def test_gauges_counters_and_the_server_ends_with_the_sink(port: int) -> None:
    sinks = Sinks([f"prometheus:{port}"])
    sinks.write(run(32, lost=20), FACTS)
    sinks.write(run(20, lost=20), FACTS)
    sinks.alarm("GS401", "zeroed-step", Severity.ERROR, "told", 20)
    found = scrape(port)
    assert not sinks.broken
    labels = '{rank="0",run="run-a"}'
    for line in (
        f"ghoststep_gradient_norm_before{labels} +Inf",
        f"ghoststep_rows_token_id{labels} 17.0",
        f"ghoststep_optimizer_lr_1{labels} 0.0001",
        f"ghoststep_steps_total{labels} 52.0",
        f"ghoststep_lost_steps_total{labels} 2.0",
        f"ghoststep_skipped_steps_total{labels} 0.0",
        f"ghoststep_tokens_total{labels} {52.0 * 32}",
        'ghoststep_alarms_total{code="GS401",name="zeroed-step",rank="0",run="run-a",severity="error"} 1.0',
        "# HELP ghoststep_optimizer_lr_1 learning rate of parameter group N",
    ):
        assert line in found.splitlines()
    sinks.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_the_server_answers_this_machine_only(port: int) -> None:
    sink = PrometheusSink(port=port)
    assert sink._server[0].server_address == ("127.0.0.1", port)
    sink.close()


def test_a_port_in_use_is_refused_and_the_local_rank_moves_it(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = Sinks([f"prometheus:{port}"])
    with pytest.raises(UsageError, match="choose another port"):
        Sinks([f"prometheus:{port}"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    other = Sinks([f"prometheus:127.0.0.1:{port}"])
    assert "python_info" not in scrape(port + 1)
    other.close()
    sinks.close()


def test_two_watched_models_share_the_registry_of_the_process_and_leave_it_as_it_was() -> None:
    registry = client.CollectorRegistry()
    first, second = PrometheusSink(registry=registry), PrometheusSink(registry=registry)
    both = Sinks([first]), Sinks([second])
    both[0].write(run(3, lost=0), FACTS)
    both[1].write(run(2, lost=0), RunFacts(run_id="run-b"))
    assert registry.get_sample_value("ghoststep_steps_total", {"run": "run-a", "rank": "0"}) == 3
    assert registry.get_sample_value("ghoststep_steps_total", {"run": "run-b", "rank": "0"}) == 2
    both[0].close()
    assert registry.get_sample_value("ghoststep_steps_total", {"run": "run-a", "rank": "0"}) is None
    assert registry.get_sample_value("ghoststep_steps_total", {"run": "run-b", "rank": "0"}) == 2
    both[1].close()
    assert not [sample for metric in registry.collect() for sample in metric.samples]
    assert not both[0].broken
    assert not both[1].broken


def test_without_a_port_the_registry_is_that_of_the_process() -> None:
    sinks = Sinks(["prometheus"])
    sinks.write(run(3), FACTS)
    assert client.REGISTRY.get_sample_value("ghoststep_steps_total", {"run": "run-a", "rank": "0"}) == 3
    sinks.close()
