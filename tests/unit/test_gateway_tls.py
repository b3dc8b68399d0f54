"""TLS on the listener and to engines, with certificates made here."""

import asyncio
import ssl
import time
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.gateway import MODEL, QUICK, answer, chat, front, text_of
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.errors import ConfigError
from weighbridge.gateway import Gateway, GatewaySettings, InstanceSettings
from weighbridge.http import ConnectFailed, HttpClient


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def instance(upstream: FakeUpstream, host: str = "localhost", **fields: object) -> InstanceSettings:
    url = f"https://{host}:{upstream.port}"
    return InstanceSettings(name="i0", url=url, kind="embedded", models=(MODEL,), **fields)  # type: ignore[arg-type]


def test_streams_through_tls_on_both_sides(authority: Authority) -> None:
    async def main() -> None:
        certificate, key = authority.issue("IP:127.0.0.1")
        tls = {"tls_cert": certificate, "tls_key": key}
        context = authority.server_context("DNS:localhost")
        async with FakeUpstream(answer, tls=context) as upstream:
            engine = instance(upstream, ca_file=str(authority.file))
            async with front(instances=(engine,), **tls) as f:
                client = HttpClient(ssl_context=authority.client_context())
                url = f"https://127.0.0.1:{f.gateway.port}/v1/chat/completions"
                for _ in range(3):
                    assert text_of((await client.request("POST", url, body=chat())).body) == "abc"
                assert (await client.request("POST", url, body=chat(False))).json()["choices"]
                await asyncio.gather(*(client.request("POST", url, body=chat()) for _ in range(20)))
                await client.close()
                with pytest.raises(ConnectFailed):
                    stranger = HttpClient()
                    try:
                        await stranger.request("POST", url, body=chat())
                    finally:
                        await stranger.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", f.gateway.port)
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
                assert await reader.read(100) in (b"", b"\x15\x03\x01\x00\x02\x02\x46", b"\x15\x03\x03\x00\x02\x02\x46")
                writer.close()
                f.assert_idle()

    run(main())


def test_old_protocol_versions_are_refused(authority: Authority) -> None:
    async def main() -> None:
        certificate, key = authority.issue("IP:127.0.0.1")
        async with front(tls_cert=certificate, tls_key=key) as f:
            context = authority.client_context()
            with pytest.warns(DeprecationWarning):
                context.minimum_version = ssl.TLSVersion.TLSv1
                context.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", f.gateway.port, ssl=context)

    run(main())


@pytest.mark.parametrize("what", ["another authority", "another name", "none"])
def test_an_engine_that_cannot_prove_who_it_is_gets_no_request(authority: Authority, what: str, tmp_path: Path) -> None:
    async def main() -> None:
        name = "DNS:elsewhere" if what == "another name" else "DNS:localhost"
        async with FakeUpstream(answer, tls=authority.server_context(name)) as upstream:
            trusted = authority.file if what != "another authority" else Authority(tmp_path, "other").file
            fields = {} if what == "none" else {"ca_file": str(trusted)}
            gateway = Gateway(
                GatewaySettings(port=0, admin_port=0, health=QUICK, instances=(instance(upstream, **fields),))
            )
            await gateway.start()
            endpoint = gateway.driver.endpoints["i0"]
            await until(lambda: endpoint.reason != "not probed yet")
            assert not endpoint.up
            assert "cert" in endpoint.reason.lower() or "verify" in endpoint.reason.lower(), endpoint.reason
            client = HttpClient()
            url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
            assert (await client.request("POST", url, body=chat())).status == 503
            assert upstream.calls == []
            await client.close()
            await gateway.stop()

    run(main())


def test_a_disconnect_reaches_the_engine_through_tls(authority: Authority) -> None:
    async def main() -> None:
        closed: list[float] = []

        async def script(call: Call) -> None:
            await call.sse_head()
            closed.append(await call.wait_closed())

        context = authority.server_context("DNS:localhost")
        async with FakeUpstream(script, tls=context) as upstream:
            engine = instance(upstream, ca_file=str(authority.file))
            async with front(instances=(engine,)) as f:
                task = asyncio.create_task(f.post(chat()))
                await until(lambda: bool(upstream.calls))
                left = time.monotonic()
                task.cancel()
                await until(lambda: bool(closed))
                assert closed[0] - left < 1.0
                await until(lambda: not f.gateway.driver.flights)
                f.assert_idle()

    run(main())


def test_a_renewed_certificate_is_taken_over_by_a_reload(authority: Authority) -> None:
    async def main() -> None:
        certificate, key = authority.issue("IP:127.0.0.1")

        async def seen(port: int) -> bytes:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=authority.client_context())
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.close()
            assert isinstance(shown, bytes)
            return shown

        async with front(tls_cert=certificate, tls_key=key) as f:
            first = await seen(f.gateway.port)
            assert await f.gateway.reload(f.gateway.settings) == []
            good = Path(certificate).read_bytes()
            Path(certificate).write_text("nonsense")
            with pytest.raises(ConfigError, match="TLS certificate"):
                await f.gateway.reload(f.gateway.settings)
            assert await seen(f.gateway.port) == first
            Path(certificate).write_bytes(good)
            authority.issue("IP:127.0.0.1")
            assert await f.gateway.reload(f.gateway.settings) == ["renewed the TLS certificate"]
            assert await seen(f.gateway.port) != first

    run(main())


def test_bad_certificate_files_are_one_clear_line(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "bad.pem").write_text("nonsense")
        for path in (tmp_path / "bad.pem", tmp_path / "absent.pem"):
            gateway = Gateway(GatewaySettings(port=0, admin_port=0, tls_cert=str(path)))
            with pytest.raises(ConfigError, match="TLS certificate"):
                await gateway.start()
            await gateway.stop()
            engine = InstanceSettings(name="a", url="https://localhost:1", ca_file=str(path))
            with pytest.raises(ConfigError, match="ca_file"):
                Gateway(GatewaySettings(instances=(engine,)))

    run(main())
