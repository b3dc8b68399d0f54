"""What-if: the same policy re-simulated is near the recording, others differ, and the child process obeys."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import msgspec
import pytest

from tests.support.loop import run, until
from weighbridge.core.errors import InputError, ServiceError
from weighbridge.core.event_log import LogReader
from weighbridge.core.instance import InstanceSpec
from weighbridge.dashboard import demo_log
from weighbridge.dashboard.asker import Asker
from weighbridge.dashboard.asking import Questions
from weighbridge.dashboard.demo import DemoSource
from weighbridge.dashboard.hub import Hub
from weighbridge.dashboard.jobs import Jobs
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.whatif import Question, answer, fleet_of, read_specs
from weighbridge.routing.replay import Wish, wish
from weighbridge.sim.runs import make_simulation


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "yesterday.jsonl"
    one = demo_log.run(requests=240)
    out = io.BytesIO()
    make_simulation(one, log=out).run(one.workload.requests(one.seed))
    path.write_bytes(out.getvalue())
    return path


def ignore(share: float, text: str) -> None:
    assert 0.0 <= share <= 1.0
    assert text


def test_the_first_rows_are_the_recording_and_its_re_simulation(log: Path) -> None:
    made = answer(Question(log=str(log), policies=("round_robin", "calibrated"), seeds=2), ignore)
    assert [r.label for r in made.rows] == ["recorded", "re-simulated, same policy", "round_robin"]
    assert made.requests == 240
    assert made.guessed_lengths == 0
    assert abs(made.fidelity) <= 0.02
    assert made.fidelity_e2e is not None and abs(made.fidelity_e2e) < 0.05
    recorded, again, other = made.rows
    assert recorded.difference is None and again.difference is None
    assert other.difference == pytest.approx(other.attainment - again.attainment)
    assert other.half_width is not None and 0 < other.half_width < 0.2
    assert other.difference < -other.half_width, "round robin over fast and slow instances must lose"
    assert len(made.changed["round_robin"]) == 20
    assert "became" in made.first_difference["round_robin"]


def test_more_load_is_worse_and_more_instances_help(log: Path) -> None:
    def attainment(**changes: object) -> float:
        question = Question(log=str(log), policies=("least_tokens",), seeds=1, **changes)  # type: ignore[arg-type]
        return answer(question, ignore).rows[2].attainment

    usual, heavy = attainment(), attainment(load=8.0)
    helped = attainment(load=8.0, counts={"h100-0": 8})
    assert heavy < usual - 0.05
    assert helped > heavy + 0.05


def test_a_window_is_cut_by_arrival(log: Path) -> None:
    made = answer(Question(log=str(log), policies=("random",), start_s=5.0, end_s=15.0, seeds=1), ignore)
    assert 40 < made.requests < 200
    with pytest.raises(InputError, match="no request arrived"):
        answer(Question(log=str(log), policies=("random",), start_s=1e6, seeds=1), ignore)


def test_an_instance_without_a_cost_model_is_named() -> None:
    with pytest.raises(InputError, match="bare has no cost model"):
        fleet_of({"bare": InstanceSpec(name="bare")}, {})
    with pytest.raises(InputError, match="no instance is left"):
        fleet_of({"bare": InstanceSpec(name="bare")}, {"bare": 0})


def test_the_form_can_name_only_known_logs_policies_and_bounded_numbers(log: Path) -> None:
    policy, specs = read_specs(log)
    assert policy == "calibrated"
    assert set(specs) == {*(f"h100-{k}" for k in range(3)), *(f"l4-{k}" for k in range(4))}

    async def work() -> None:
        questions = Questions(Hub(DemoSource(7)), Jobs([log]))
        bad = (
            "policy=nonsense", "policy=random&load=0", "policy=random&load=1000", "policy=random&start=9&end=3",
            "policy=random&seeds=99", "policy=random&n_h100-0=1000", "policy=random&start=x",
        )  # fmt: skip
        for text in bad:
            assert questions.start(Query.parse(text)) == "/whatif"
            assert questions.refused
            assert questions.jobs.running is None
        # a path is never taken from the form: the number is out of range, so the first known log is used
        question = questions._question(Query.parse("policy=random&log=../../etc/passwd"))
        assert question.log == str(log)
        await questions.close()

    run(work())


def test_a_job_runs_in_a_child_process_to_its_answer(log: Path) -> None:
    async def work() -> None:
        jobs = Jobs([log])
        job = jobs.start(Question(log=str(log), policies=("round_robin",), end_s=5.0, seeds=1))
        with pytest.raises(ServiceError, match="another question"):
            jobs.start(job.question)
        await until(lambda: job.state != "running", 100.0)
        assert job.state == "done", job.error
        assert job.answer is not None and len(job.answer.rows) == 3
        failing = jobs.start(Question(log=str(log.with_name("missing")), policies=("random",)))
        await until(lambda: failing.state != "running", 30.0)
        assert failing.state == "failed" and "No such file" in failing.error
        await jobs.close()

    run(work(), timeout_s=115.0)


def test_cancelling_ends_the_child_at_once(log: Path) -> None:
    async def work() -> None:
        jobs = Jobs([log])
        job = jobs.start(Question(log=str(log), policies=("round_robin", "random", "work"), seeds=10))
        await until(lambda: job.share > 0.0, 30.0)
        process = job.process
        assert process is not None
        jobs.cancel()
        assert job.state == "cancelled"
        await until(lambda: process.returncode is not None, 5.0)
        await jobs.close()

    run(work())


def test_another_policy_is_asked_about_one_request_on_the_ledger_of_its_time(log: Path) -> None:
    with log.open("rb") as stream:
        reader = LogReader(stream)
        found = wish(reader.header, reader, "round_robin", {}, "r20")
    assert isinstance(found, Wish)
    assert found.recorded and found.wished

    async def work() -> None:
        asker = Asker()
        got = await asker.ask(log, "r20", "round_robin")
        assert got == found
        assert asker.known(str(log), "r20", "round_robin") == found
        missing = await asker.ask(log, "no-such-request", "round_robin")
        assert missing == "the log holds no placement of this request"
        assert await asyncio.wait_for(asker.ask(log, "r20", "no-such-policy"), 30) != found

    run(work())
    assert msgspec.json.decode(msgspec.json.encode(found), type=Wish) == found
