"""`model: auto` through the gateway: which engine gets it, what the record says, feedback, keys, bad headers."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.support.gateway import MODEL, answer, chat, front, instance
from tests.support.loop import run
from tests.support.upstream import FakeUpstream
from tests.unit.test_selection_checkpoint import dataset
from weighbridge.core.events import RequestArrived
from weighbridge.core.instance import Rates
from weighbridge.core.request import Request
from weighbridge.cost.profile import Profile, encode_profile
from weighbridge.gateway.settings import KeySettings
from weighbridge.routing.router import RouterSettings
from weighbridge.selection import checkpoint
from weighbridge.selection.settings import SelectionSettings
from weighbridge.selection.train import TrainSettings, train

POOL = """
pool: two
models:
  - {name: big, input_usd_per_1m: 5, output_usd_per_1m: 50}
  - {name: small, input_usd_per_1m: 0.1, output_usd_per_1m: 0.2}
"""
POEM = [{"role": "user", "content": "write a cheerful poem number 5 please 7"}]
PROOF = [{"role": "user", "content": "prove the algebra theorem number 5 please 7"}]
STRANGE = [
    {"role": "user", "content": "¿Cuánto cuesta un billete de tren a Sevilla mañana por la tarde, ida y vuelta?"}
]
KEY = "k" * 40


def selection(folder: Path, **fields: Any) -> SelectionSettings:
    checkpoint.save(train(dataset(), TrainSettings(buckets=1024), pool="two", created="2026-01-01"), folder / "ck")
    (folder / "pool.yaml").write_text(POOL)
    return SelectionSettings(pool=str(folder / "pool.yaml"), checkpoint=str(folder / "ck"), **fields)


def two_models(big: FakeUpstream, small: FakeUpstream, profile: str | None = None, **fields: Any) -> Any:
    instances = (
        instance(big, "i-big", models=("big",), profile=profile),
        instance(small, "i-small", models=("small",), profile=profile),
    )
    return front(instances=instances, **fields)


def auto(messages: list[dict[str, str]], **fields: Any) -> bytes:
    return chat(model="auto", messages=messages, **fields)


def test_auto_picks_the_model_and_only_the_model_in_the_body_changes(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            FakeUpstream(answer) as big,
            FakeUpstream(answer) as small,
            two_models(big, small, selection=selection(tmp_path)) as f,
        ):
            poem = await f.post(auto(POEM, stream=False), x_weighbridge_explain="1", x_request_id="poem-1")
            proof = await f.post(auto(PROOF))
            assert (poem.status, proof.status) == (200, 200)
            assert poem.header(b"x-weighbridge-model") == b"small"
            assert proof.header(b"x-weighbridge-model") == b"big"
            assert json.loads(poem.header(b"x-weighbridge-selection"))["model"] == "small"
            assert proof.header(b"x-weighbridge-selection") is None
            (sent,) = small.calls
            # what the gateway itself adds for an engine (such as a priority) stands before the client's own bytes
            assert sent.body.endswith(auto(POEM, stream=False).replace(b'"auto"', b'"small"')[1:])
            assert len(big.calls) == 1
            rows = json.loads((await f.get("/selections", admin=True)).body)["selections"]
            assert [row["decision"]["model"] for row in rows] == ["big", "small"]
            assert rows[1]["request_id"] == "poem-1"
            assert (await f.get("/selections?last=x", admin=True)).status == 400
            models = {row["id"] for row in json.loads((await f.get("/v1/models")).body)["data"]}
            assert models == {"auto", "big", "small"}
            f.assert_idle()

    run(main())


def test_an_unknown_family_goes_to_the_fallback_and_the_record_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            FakeUpstream(answer) as big,
            FakeUpstream(answer) as small,
            two_models(big, small, selection=selection(tmp_path, fallback="small")) as f,
        ):
            reply = await f.post(auto(STRANGE))
            assert reply.header(b"x-weighbridge-model") == b"small"
            row = json.loads((await f.get("/selections", admin=True)).body)["selections"][0]
            assert row["decision"]["known"] is False
            assert row["decision"]["reason"] == "unknown task family: fallback"

    run(main())


def test_a_saturated_model_is_avoided_in_balanced_and_kept_in_quality(tmp_path: Path) -> None:
    async def main() -> None:
        profile = tmp_path / "profile.json"
        profile.write_bytes(
            encode_profile(Profile(rates=Rates(prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0)))
        )
        async with (
            FakeUpstream(answer) as big,
            FakeUpstream(answer) as small,
            two_models(big, small, profile=str(profile), selection=selection(tmp_path)) as f,
        ):
            driver = f.gateway.driver
            idle = await f.post(auto(PROOF), x_weighbridge_explain="1")
            assert idle.header(b"x-weighbridge-model") == b"big"
            weighed = json.loads(idle.header(b"x-weighbridge-selection"))["candidates"]
            assert all(candidate["latency_s"] > 0 for candidate in weighed)
            # hours of prompts wait on the big model's only instance, at the speeds that the router has learned
            crowd = Request(id="crowd", arrival_s=driver.now(), prompt_tokens=9_000_000, max_tokens=1, model="big")
            driver.router.handle(RequestArrived(request=crowd), driver.now())
            busy = await f.post(auto(PROOF))
            assert busy.header(b"x-weighbridge-model") == b"small"
            wanted = await f.post(auto(PROOF), x_weighbridge_mode="quality")
            assert wanted.header(b"x-weighbridge-model") == b"big"
            bounded = await f.post(auto(PROOF), x_weighbridge_mode="quality", x_weighbridge_max_latency_s="60")
            assert bounded.header(b"x-weighbridge-model") == b"small"

    run(main())


def test_a_model_without_an_instance_is_never_chosen(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as small:
            only = (instance(small, "i-small", models=("small",)),)
            async with front(instances=only, selection=selection(tmp_path)) as f:
                assert (await f.post(auto(PROOF))).header(b"x-weighbridge-model") == b"small"
                none = await f.post(auto(PROOF), x_weighbridge_mode="fixed", x_weighbridge_model="big")
                assert none.status == 400
                assert "no healthy instance" in json.loads(none.body)["error"]["message"]

    run(main())


def test_feedback_teaches_and_is_kept(tmp_path: Path) -> None:
    async def chance_of_big(f: Any) -> float:
        reply = await f.post(auto(PROOF), x_weighbridge_explain="1")
        return float(json.loads(reply.header(b"x-weighbridge-selection"))["candidates"][0]["quality"])

    async def main() -> None:
        settings = selection(tmp_path, feedback_log=str(tmp_path / "feedback.jsonl"))
        async with FakeUpstream(answer) as big, FakeUpstream(answer) as small:
            async with two_models(big, small, selection=settings) as f:
                before = await chance_of_big(f)
                for n in range(12):
                    await f.post(auto(PROOF), x_request_id=f"r{n}")
                    said = json.dumps({"request_id": f"r{n}", "score": 0.0}).encode()
                    reply = await f.post(said, "/v1/feedback")
                    assert reply.status == 200, reply.body
                after = await chance_of_big(f)
                assert after < before - 0.5
                for bad, status in ((b'{"request_id":"no","score":1}', 404), (b'{"score":1}', 400), (b"x", 400)):
                    assert (await f.post(bad, "/v1/feedback")).status == status
                out_of_range = await f.post(b'{"request_id":"r1","score":7}', "/v1/feedback")
                assert (out_of_range.status, json.loads(out_of_range.body)["error"]["param"]) == (400, "score")
            assert len((tmp_path / "feedback.jsonl").read_bytes().splitlines()) == 12
            async with two_models(big, small, selection=settings) as f:  # a restart remembers
                assert abs(await chance_of_big(f) - after) < 0.01

    run(main())


def test_headers_keys_and_sessions(tmp_path: Path) -> None:
    async def main() -> None:
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        narrow = KeySettings(sha256=digest, tenant="t", models=("auto", "small"))
        settings = selection(tmp_path)
        async with FakeUpstream(answer) as big, FakeUpstream(answer) as small:
            async with two_models(big, small, selection=settings, keys=(narrow,)) as f:
                assert (await f.post(auto(PROOF))).status == 401
                reply = await f.post(auto(PROOF), authorization=f"Bearer {KEY}")
                assert reply.header(b"x-weighbridge-model") == b"small"
            async with two_models(big, small, selection=settings) as f:
                for name, value in (("mode", "best"), ("max_cost_usd", "cheap"), ("min_quality", "-1")):
                    refused = await f.post(auto(POEM), **{f"x_weighbridge_{name}": value})
                    assert refused.status == 400, name
                cheap = await f.post(
                    auto(PROOF), x_weighbridge_mode="max_cost_usd", x_weighbridge_max_cost_usd="0.00005"
                )
                assert cheap.header(b"x-weighbridge-model") == b"small"
                first = await f.post(auto(POEM), x_session_id="s", x_weighbridge_explain="1")
                again = await f.post(auto(PROOF), x_session_id="s", x_weighbridge_explain="1")
                assert first.header(b"x-weighbridge-model") == b"small"
                assert "leaves small" in json.loads(again.header(b"x-weighbridge-selection"))["reason"]

    run(main())


def test_without_the_section_auto_is_an_unknown_model() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream, router=RouterSettings(policy="round_robin")) as f:
            assert (await f.post(auto(POEM))).status == 404
            assert (await f.post(b"{}", "/v1/feedback")).status == 404
            assert (await f.post(chat(model=MODEL))).status == 200
            assert json.loads((await f.get("/selections", admin=True)).body) == {"selections": []}

    run(main())
